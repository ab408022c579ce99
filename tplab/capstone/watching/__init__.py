"""Views of a run while it trains.

log_tail     the status of the run, read from its growing log
console      the run as lines in a terminal
panel        the run as a live view in a notebook or terminal
panel_view   the look of that view
"""
