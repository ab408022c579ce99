"""`tplab.gpt.generation`. That the best tokens are Hugging Face's for every p is in test_hugging_face_folder."""

import pytest
import torch
import torch.distributed as dist

from tests.gpt.random_models import (
    BATCH,
    HIDDEN,
    LAYERS,
    LENGTH,
    NEW,
    PROMPT,
    VOCAB,
    given,
    hugging_face,
    make,
    prompt,
    their_text,
)
from tests.tensor.on_ranks import GROUPS, own_group, refusals, traffic
from tplab import launch, record
from tplab.gpt.generation import candidates, generate

DRAWS = [(0.5, None), (2.0, 5)]  # temperature, top_k
CHOICES = [{}, {"temperature": 1.0, "top_k": 6}]


def stop_token():
    """The third new one of the first text."""
    return their_text(hugging_face("gpt2"), prompt(), NEW)[0, PROMPT + 2].item()


# Programs


def _drawn(model, temperature, top_k):
    """With another seed on each rank: the first new token of 3000 equal prompts, the logits, and a longer text."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    options = {"temperature": temperature, "top_k": top_k, "generator": generator}
    text = generate(model, prompt()[:1].expand(3000, -1), 1, **options)
    with torch.no_grad():
        logits = model(prompt()[:1], gather=True)[0, -1]
    return text[:, -1], logits, generate(model, prompt(), NEW, **options)


def seeded(model):
    generator = torch.Generator().manual_seed(4)
    return generate(model, prompt(), NEW, temperature=1.5, top_k=20, generator=generator)


def best(model):
    """Candidates among logits of which many are equal, and in which padding looks best."""
    whole = torch.arange(VOCAB).remainder(7).double().repeat(2, 1)
    whole[1] = -whole[1]
    padded = torch.full((2, model.world_size * model.output_weight.shape[0]), 99.0, dtype=torch.float64)
    padded[:, :VOCAB] = whole
    return [candidates(model, padded.chunk(model.world_size, 1)[model.rank], k) for k in (1, 4, None)]


def _sent(model, options):
    with record() as section:
        generate(model, prompt(), NEW, **options)
    return traffic(section)[0]


def _in_groups(given):
    generator, model = torch.Generator().manual_seed(dist.get_rank()), make(*given, own_group())
    return generate(model, prompt(), NEW), generate(model, prompt(), NEW, temperature=2.0, generator=generator)


def _everything(gpt2, llama, stop):
    model, other = make(*gpt2).train(), make(*llama).eval()
    stopped = [generate(model, ids, NEW, stop_id=stop) for ids in (prompt(), prompt()[:1])]
    found = {
        "stopped": stopped,
        "seeded": seeded(model),
        "best": best(model),
        "drawn": [_drawn(other, *draw) for draw in DRAWS],
        "sent": [_sent(other, options) for options in CHOICES],
        "in groups": _in_groups(gpt2),
    }
    assert (model.training, other.training) == (True, False)  # as they were before
    return found


@pytest.fixture(scope="module")
def ran():
    return launch(_everything, 4, args=(given("gpt2"), given("llama 3.1"), stop_token()), timeout=240)


# What they show


def test_behind_a_stop_token_a_text_is_filled_up_and_all_end_when_all_have_stopped(ran):
    free, stop = their_text(hugging_face("gpt2"), prompt(), NEW), stop_token()
    first = (free[0, PROMPT:] == stop).nonzero()[0].item()
    for text, one in (result["stopped"] for result in ran):
        for row, whole in zip(text, free, strict=True):
            places = (whole[PROMPT:] == stop).nonzero()
            end = PROMPT + places[0].item() + 1 if len(places) else len(whole)
            assert torch.equal(row[:end], whole[:end])
            assert (row[end:] == stop).all()
        assert one.shape == (1, PROMPT + first + 1)  # nothing is left to do


@pytest.mark.parametrize("number", range(len(DRAWS)))
def test_draws_follow_the_softmax_and_are_the_same_on_every_rank_whatever_their_seeds(number, ran):
    (drawn, logits, longer), *others = (result["drawn"][number] for result in ran)
    for other in others:
        assert torch.equal(other[0], drawn)
        assert torch.equal(other[2], longer)
    temperature, top_k = DRAWS[number]
    odds = (logits / temperature).softmax(0)
    if top_k == 5:
        best = odds.topk(5).indices
        odds = torch.zeros_like(odds).index_copy(0, best, odds[best] / odds[best].sum())
    share = torch.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert (share[odds == 0] == 0).all()
    # the largest of 300 shares is off by more than 0.07 with a probability below 1e-9 (Hoeffding: 600 exp(-2 n x^2))
    assert (share - odds).abs().max() < 0.07


def test_the_same_seed_draws_the_same_text_for_every_p(ran):
    alone = seeded(make(*given("gpt2")))
    assert all(torch.equal(result["seeded"], alone) for result in ran)


def test_candidates_are_the_best_of_the_vocabulary_lower_ids_first_and_never_padding(ran):
    whole = torch.arange(VOCAB).remainder(7).double()
    for found in [best(make(*given("gpt2"))), *(result["best"] for result in ran)]:
        for (values, ids), k in zip(found, (1, 4, VOCAB), strict=True):
            for row, sign in ((0, 1), (1, -1)):
                order = sorted(range(VOCAB), key=lambda i: (-sign * whole[i].item(), i))[:k]
                assert ids[row].tolist() == order
                assert values[row].tolist() == (sign * whole[order]).tolist()


def test_a_token_sends_bh_for_each_block_and_the_candidates(ran):
    def blocks(tokens):
        return [("all_reduce", "sum", 8 * BATCH * tokens * HIDDEN)] * (2 * LAYERS + 1)

    one, six = ([("all_gather", None, len(ran) * k * 8 * BATCH)] * 2 for k in (1, 6))  # a logit and an id each
    for result in ran:
        for sent, choice in zip(result["sent"], (one, [*six, ("broadcast", None, 8 * BATCH)]), strict=True):
            assert sent == blocks(PROMPT) + choice + (NEW - 1) * (blocks(1) + choice)


def test_two_groups_side_by_side_write_their_own_texts(ran):
    greedy, drawn = zip(*(result["in groups"] for result in ran), strict=True)
    assert all(torch.equal(text, their_text(hugging_face("gpt2"), prompt(), NEW)) for text in greedy)
    assert all(torch.equal(drawn[first], drawn[second]) for first, second in GROUPS)
    assert not torch.equal(drawn[0], drawn[1])


REFUSED = [
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": 0}, "top_k=0"),
    ({"max_new_tokens": 30}, f"seq_length={LENGTH}"),
    ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "prompt [1, 0]"),
]


def test_arguments_that_do_not_fit_are_refused_with_the_numbers():
    model = make(*given("gpt2"))
    for options, words in REFUSED:
        (message,) = refusals(
            lambda options=options: generate(model, **{"prompt": prompt(), "max_new_tokens": 2} | options)
        )
        assert words in message
        assert model.training  # as it was before, where it was refused halfway too
