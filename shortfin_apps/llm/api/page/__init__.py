"""The page at `/`: its files, and the feed of what it shows."""
