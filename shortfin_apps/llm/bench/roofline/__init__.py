"""How near a compiled model's entries are to what the machine under them can do."""
