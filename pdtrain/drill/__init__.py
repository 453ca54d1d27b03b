"""Breaking things on purpose, on copies, to see that the doctor names what was broken."""
