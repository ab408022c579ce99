"""What the checks of all chapters are made of.

exercises          `check("4.1", answer)`, and how a check is registered
cases              one answer, many cases: run on 1, 2 and 4 ranks, in groups too, and compared on every rank
check_vocabulary   random inputs, groups, and when to ask which question
run_answer         run the learner's code, and say what failed and on which line
observation        outputs, gradients and traffic of one rank
verification       compare all ranks with what is right, and ask one question
differences, mistake_kinds, describe, recorded_traffic   how a value differs, in words
ledger             what the running check has compared so far
predictions, symptoms, failures   predict(), symptoms(), show_failure()
"""
