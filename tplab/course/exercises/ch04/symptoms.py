"""The table of symptoms and their causes for chapter 04."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The output is off by (p - 1) times the bias, so it's correct only while the bias is zero",
        cause="Every rank adds the bias before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="The output is correct, but the bias learns p times too slowly",
        cause="The bias is divided by p before the all-reduce",
        exercise="4.2",
    ),
    Symptom(
        see="The output is correct, but the ranks' copies of the bias differ",
        cause="Only one rank adds the bias, so the other ranks' copies receive no gradient",
        exercise="4.2",
    ),
    Symptom(
        see="Everything is correct except the gradient of the input",
        cause="At the input of a column-parallel layer, f is missing or applied twice",
        exercise="4.1",
    ),
    Symptom(
        see="The gradients of the weight and of the input are p times too large, but the gradient of the bias is right",
        cause="g all-reduces in the backward pass, too, as torch.distributed.nn.functional.all_reduce does",
        exercise="4.2",
    ),
    Symptom(
        see="mat1 and mat2 shapes cannot be multiplied",
        cause="A layer receives the full input but expects a slice, or the other way around (see input_is_parallel and "
        "gather_output)",
        exercise="4.2",
    ),
    Symptom(
        see="The weight's gradient is None",
        cause="The forward pass calls dist.all_gather, which fills new tensors that autograd doesn't know about",
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
]
