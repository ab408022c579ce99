"""The table of symptoms and their causes at the end of chapter 04's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="Output off by (p - 1) times the bias; right while the bias is zero",
        cause="The bias is added on every rank, before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="Output right, the bias learns p times too slowly",
        cause="The bias is divided by p before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="Output right, the copies of the bias differ between ranks",
        cause="Only one rank adds the bias, the others' copies get no gradient",
        exercise="4.2",
    ),
    Symptom(
        see="Everything right but the gradient of the input",
        cause="f is missing at the input of a column-parallel layer, or applied twice",
        exercise="4.1",
    ),
    Symptom(
        see="All gradients p times too large",
        cause="The backward pass of g all-reduces too, as torch.distributed.nn.functional.all_reduce does",
        exercise="4.2",
    ),
    Symptom(
        see="mat1 and mat2 shapes cannot be multiplied",
        cause="A whole input where a slice is expected, or a slice where the whole is expected: input_is_parallel, "
        "gather_output",
        exercise="4.2",
    ),
    Symptom(
        see="No gradient for the weight (None)",
        cause="A dist call in the forward pass: autograd does not know it",
        exercise="4.1",
    ),
    Symptom(
        see="Training is fine, the checkpoint is wrong at another p",
        cause="A fused weight was cut with the wrong stride, or a replicated parameter has drifted",
        exercise="4.3",
    ),
    Symptom(
        see="Another loss curve for every p",
        cause="Each rank drew its shard directly: wrong standard deviation, equal shards",
        exercise="4.4",
    ),
    Symptom(
        see="Sharding saves no memory", cause="The shard is a view and keeps the full tensor alive", exercise="4.3"
    ),
]
