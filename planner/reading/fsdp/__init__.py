"""The constants of a rendered FSDP2 module; see module.py."""
