"""Views that show a run while it trains, by reading its growing log."""
