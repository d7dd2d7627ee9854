"""AMD machine code: code objects, and the instructions in them."""
