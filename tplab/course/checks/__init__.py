"""This package contains the building blocks for checks. Its modules use these words:

answer        the learner's function or class, or several of them, if an exercise asks for several
trial         what a check tries with an answer. It runs the answer in many cases on ranks, or calls it in this process
case          one way to construct the learner's module or call their function
twin          a variant of a case that differs in one condition, such as the dtype
observation   a named value that a check records on a rank, such as "dx"
ledger        what a running check has compared so far

exercises           define `check("4.1", answer)`
trials              define what a check tries, register it, and run the known mistakes beside a wrong answer
forms               the recurring kinds of trials
known_mistakes      try every known mistake as an answer, and find out which question it gets
choose              choose the question for a wrong answer from the tables of mistakes
reference_answers   make the reference answers of an exercise, with or without a known mistake
cases               run an answer in many cases, on 1, 2 and 4 ranks and in groups, and compare every rank's results
layouts             preserve the memory layouts of tensors that a check sends to a rank
twins               define the variants of each case (its twins), such as in bfloat16 or with non-contiguous tensors
late                hold messages back until a rank waits for them, and find tensors that are touched too early
messages            watch the messages that an answer starts, and keep them from disturbing what runs after it
run_answer          run the learner's code, and if it fails, report what failed and on which line
observation         record the outputs, gradients and traffic on one rank
differences         compare every rank's results with the expected values, and describe how they differ
tensor_differences  describe how a tensor is wrong: scaled, permuted, another rank's, ...
combinations        find out which combination of the ranks' tensors a wrong tensor is
describe            describe values, as in "a tuple of 2 (tensor [3, 4], None)"
recorded_traffic    compare one rank's traffic with the expected traffic
default_device      find tensors that the learner's code creates on the CPU even if its input is on a GPU
used_functions      find out whether an answer uses tplab's own implementation, or an earlier answer that's wrong
ledger              keep track of what the running check has compared so far, and build the failure that it raises
predictions         define predict() and symptoms()
failures            define show_failure()
"""
