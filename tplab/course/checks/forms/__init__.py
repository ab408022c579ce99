"""The recurring kinds of exercises. Each form is written once, so most checks are only a few lines.

operators    an operator that is a single autograd function
alone        a function that needs no ranks
statements   statements about an answer that have to be true, such as "9 columns are refused"
layers       a layer that each rank builds from its shards of full weights, as in chapters 04 and 05
"""
