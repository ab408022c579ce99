"""The training text, from files on the disk to the batch of a step.

corpus        the standard library's sources, or any folder of text
tokenizer     a byte-pair tokenizer, trained on that text
prepare       tokenize once and share the result between ranks and runs
token_files   token files on the disk, checked before they are used
batches       which tokens a step trains on: a function of the step's number
"""
