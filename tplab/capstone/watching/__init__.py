"""Follow a run while it trains.

log_tail     what a growing log says so far
console      the run as lines in a terminal
panel        the run as a live page in a notebook
panel_view   what that page looks like
"""
