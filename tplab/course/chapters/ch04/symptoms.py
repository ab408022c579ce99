"""The table of symptoms and their causes for chapter 04."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The output is off by (p - 1) times the bias, and right as long as the bias is zero",
        cause="Every rank adds the bias before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="The output is right, but the bias learns p times too slowly",
        cause="The bias is divided by p before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="The output is right, but the ranks' copies of the bias differ",
        cause="Only one rank adds the bias, so the other copies get no gradient",
        exercise="4.2",
    ),
    Symptom(
        see="Everything is right except the gradient of the input",
        cause="f is missing at the input of a column-parallel layer, or it's applied twice",
        exercise="4.1",
    ),
    Symptom(
        see="All gradients are p times too large",
        cause="The backward pass of g all-reduces too, as the one of torch.distributed.nn.functional.all_reduce does",
        exercise="4.2",
    ),
    Symptom(
        see="mat1 and mat2 shapes cannot be multiplied",
        cause="A full input arrives where a slice is expected, or the other way round (input_is_parallel, "
        "gather_output)",
        exercise="4.2",
    ),
    Symptom(
        see="The weight's gradient is None",
        cause="There's a dist call in the forward pass, which autograd can't see",
        exercise="4.1",
    ),
    Symptom(
        see="Training looks fine, but the checkpoint is wrong for any other p",
        cause="A fused weight was split with the wrong stride, or a replicated parameter has drifted",
        exercise="4.3",
    ),
    Symptom(
        see="Each p gives a different loss curve",
        cause="Each rank drew its shard directly, so the standard deviation is wrong, or all shards are equal",
        exercise="4.4",
    ),
    Symptom(
        see="Sharding doesn't save any memory",
        cause="The shard is a view, which keeps the full tensor alive",
        exercise="4.3",
    ),
]
