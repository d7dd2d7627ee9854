"""Devices that execute VMFBs; the only package besides `build` that imports shortfin or IREE."""
