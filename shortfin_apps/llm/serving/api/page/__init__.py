"""The page at `/`: its static files and its feed of snapshots."""
