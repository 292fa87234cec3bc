"""The view of a running job from another terminal: the client of its socket, figures and the table."""
