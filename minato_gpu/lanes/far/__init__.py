"""Workers of other machines: a lane here, an agent there, and a TCP connection between the two."""
