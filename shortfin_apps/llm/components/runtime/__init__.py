"""Devices that execute VMFBs; only this package and `builder` import shortfin or IREE."""
