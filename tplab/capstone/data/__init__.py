"""The training text, from files on disk to the batch of a step.

corpus        the standard library's sources, or any folder of text
tokenizer     a byte-pair tokenizer, trained on that text
prepare       tokenize once and share the result between ranks and runs
token_files   token files on disk, checked before they are used
batches       the tokens that a step trains on, computed from the step's number
"""
