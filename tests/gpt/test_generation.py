"""`tplab.gpt.generation`, against Hugging Face's `generate` and a single-process loop over all the logits."""

import pytest
import torch
import torch.distributed as dist

from tests.gpt.test_hugging_face_folder import HIDDEN, LAYERS, NEW, PROMPT, VOCAB
from tests.gpt.test_hugging_face_folder import hugging_face as random_model
from tests.gpt.test_model import make
from tests.tensor.on_ranks import GROUPS, own_group, traffic
from tplab import launch, record
from tplab.gpt.generation import candidates, generate
from tplab.gpt.hugging_face import gpt_config

WORLD_SIZES = (1, 2, 4)
BATCH = 3


def hugging_face(kind):
    """Their model "gpt2" or "llama", and its configuration."""
    model = random_model({"llama": "llama 3.1"}.get(kind, kind))
    return model, gpt_config(model.config.to_dict())


def prompt():
    return torch.randint(0, VOCAB, (BATCH, PROMPT), generator=torch.Generator().manual_seed(8))


def given(kind):
    model, config = hugging_face(kind)
    return model.state_dict(), config


def _greedy(state, config):
    model = make(state, config).train()
    text = generate(model, prompt(), NEW)
    assert model.training  # as it was before
    return text


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_tokens_are_hugging_faces(kind, p):
    theirs = hugging_face(kind)[0].generate(
        prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert len({(row >= VOCAB // 2).sum().item() for row in theirs}) > 1 or (theirs >= VOCAB // 2).any()
    results = launch(_greedy, p, args=given(kind))
    assert len(results) == p
    assert all(torch.equal(text, theirs) for text in results)


def _uneven(state, config):
    lengths = [5, 2, 3]
    model = make(state, config)
    ids = prompt()
    together = generate(model, ids, NEW, prompt_lengths=lengths)
    assert torch.equal(ids, prompt())
    assert torch.equal(generate(model.eval(), ids, 0), ids)  # nothing new is asked for
    assert not model.training  # as it was before
    alone = [generate(model, prompt()[i : i + 1, :n], PROMPT + NEW - n) for i, n in enumerate(lengths)]
    stop = prompt()[0, 3].item()  # known, and behind the place where the others already go on: it stops nothing
    stopped = generate(model, prompt(), NEW, prompt_lengths=lengths, stop_id=stop)
    first = generate(model, prompt()[:1], NEW, stop_id=stop)
    assert first.shape[1] > PROMPT + 1
    assert torch.equal(stopped[0, : first.shape[1]], first[0])
    return together, torch.cat(alone)


@pytest.mark.parametrize("p", [1, 2])
def test_prompts_of_different_lengths_go_on_as_each_of_them_alone(p):
    for together, alone in launch(_uneven, p, args=given("llama")):
        assert torch.equal(together, alone)


def _stopping(state, config, stop_id):
    model = make(state, config)
    return [generate(model, ids, NEW, stop_id=stop_id) for ids in (prompt(), prompt()[:1])]


def test_behind_a_stop_token_a_text_is_filled_up_and_all_end_when_all_have_stopped():
    free = launch(_greedy, 2, args=given("gpt2"))[0]
    stop = free[0, PROMPT + 2].item()
    first = (free[0, PROMPT:] == stop).nonzero()[0].item()
    text, one = launch(_stopping, 2, args=(*given("gpt2"), stop))[1]
    for row, whole in zip(text, free, strict=True):
        places = (whole[PROMPT:] == stop).nonzero()
        end = PROMPT + places[0].item() + 1 if len(places) else len(whole)
        assert torch.equal(row[:end], whole[:end])
        assert (row[end:] == stop).all()
    assert one.shape == (1, PROMPT + first + 1)  # nothing is left to do


def _sample(state, config, temperature, top_k, seed_by_rank):
    model = make(state, config)
    generator = torch.Generator().manual_seed(dist.get_rank() if seed_by_rank else 4)
    many = prompt()[:1].expand(3000, -1)
    text = generate(model, many, 1, temperature=temperature, top_k=top_k, generator=generator)
    with torch.no_grad():
        logits = model(prompt()[:1], gather=True)[0, -1]
    longer = generate(model, prompt(), NEW, temperature=temperature, top_k=top_k, generator=generator)
    return text[:, -1], logits, longer


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 5), (1.0, 10_000)])
def test_draws_follow_the_softmax_and_are_the_same_on_every_rank_whatever_their_seeds(temperature, top_k):
    results = launch(_sample, 2, args=(*given("llama"), temperature, top_k, True))
    drawn, logits, longer = results[0]
    assert torch.equal(results[1][0], drawn)
    assert torch.equal(results[1][2], longer)
    odds = (logits / temperature).softmax(0)
    if top_k == 5:
        best = odds.topk(5).indices
        odds = torch.zeros_like(odds).index_copy(0, best, odds[best] / odds[best].sum())
    share = torch.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert (share[odds == 0] == 0).all()
    # the largest of 300 shares is off by more than 0.07 with a probability below 1e-9 (Hoeffding: 600 exp(-2 n x^2))
    assert (share - odds).abs().max() < 0.07


def test_the_same_seed_draws_the_same_text_for_every_p():
    one = launch(_sample, 1, args=(*given("gpt2"), 1.5, 20, False))[0]
    for p in (2, 4):
        drawn, _, longer = launch(_sample, p, args=(*given("gpt2"), 1.5, 20, False))[p - 1]
        assert torch.equal(drawn, one[0])
        assert torch.equal(longer, one[2])


def _candidates(state, config):
    model = make(state, config)
    width = model.output_weight.shape[0]
    whole = torch.arange(VOCAB).remainder(7).double().repeat(2, 1)  # many are equal
    whole[1] = -whole[1]
    padded = torch.full((2, model.world_size * width), 99.0, dtype=torch.float64)  # padding looks best
    padded[:, :VOCAB] = whole
    mine = padded.chunk(model.world_size, 1)[model.rank]
    return [candidates(model, mine, k) for k in (1, 4, None)]


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_candidates_are_the_best_of_the_vocabulary_lower_ids_first_and_never_padding(p):
    whole = torch.arange(VOCAB).remainder(7).double()
    for result in launch(_candidates, p, args=given("gpt2")):
        for (values, ids), k in zip(result, (1, 4, VOCAB), strict=True):
            for row, sign in ((0, 1), (1, -1)):
                order = sorted(range(VOCAB), key=lambda i: (-sign * whole[i].item(), i))[:k]
                assert ids[row].tolist() == order
                assert values[row].tolist() == (sign * whole[order]).tolist()


def _traffic(state, config, options):
    model = make(state, config)
    with record() as section:
        generate(model, prompt(), NEW, **options)
    return traffic(section)[0]


@pytest.mark.parametrize(
    ("options", "choice"),
    [
        ({}, [("all_gather", None, 2 * 8 * BATCH)] * 2),  # one logit and one id a text
        (
            {"temperature": 1.0, "top_k": 6},
            [*[("all_gather", None, 2 * 6 * 8 * BATCH)] * 2, ("broadcast", None, 8 * BATCH)],
        ),
    ],
)
def test_a_token_sends_bh_for_each_block_and_the_candidates(options, choice):
    def blocks(tokens):
        return [("all_reduce", "sum", 8 * BATCH * tokens * HIDDEN)] * (2 * LAYERS + 1)

    expected = blocks(PROMPT) + choice + (NEW - 1) * (blocks(1) + choice)
    for p in (1, 2):
        for calls in launch(_traffic, p, args=(*given("llama"), options)):
            assert calls == (expected if p > 1 else [])


def _in_groups(state, config):
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = make(state, config, group=own_group())
    return generate(model, prompt(), NEW), generate(model, prompt(), NEW, temperature=2.0, generator=generator)


def test_two_groups_side_by_side_write_their_own_texts():
    greedy = launch(_greedy, 1, args=given("gpt2"))[0]
    results = launch(_in_groups, 4, args=given("gpt2"))
    assert all(torch.equal(text, greedy) for text, _ in results)
    drawn = [text for _, text in results]
    assert all(torch.equal(drawn[first], drawn[second]) for first, second in GROUPS)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"prompt_lengths": [1, 2]}, r"should be 3 numbers from 1 to 5"),
        ({"prompt_lengths": [0, 2, 2]}, r"\[0, 2, 2\]"),
        ({"max_new_tokens": 30}, r"more than seq_length=24"),
        ({"prompt": torch.zeros(5, dtype=torch.long)}, r"should be ids \[b, s\]"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, r"one token at least"),
        ({"prompt": torch.zeros(1, 2)}, r"should be ids"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_numbers(options, says):
    options = {"prompt": prompt(), "max_new_tokens": 2} | options
    model = make(*given("gpt2"))
    with pytest.raises(ValueError, match=says):
        generate(model, options.pop("prompt"), options.pop("max_new_tokens"), **options)
    assert model.training  # as it was before, where it was refused halfway too
