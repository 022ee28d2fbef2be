"""The demo: everything on this host, with faults to order."""
