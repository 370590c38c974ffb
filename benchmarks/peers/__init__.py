"""gradstow against every other way to save activation memory; see ``__main__``."""
