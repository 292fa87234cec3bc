"""What a tier keeps: policies and the future that they know. Decisions only: no clock, thread, file or socket."""
