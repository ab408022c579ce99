"""Views of a run while it trains, which read its growing log."""
