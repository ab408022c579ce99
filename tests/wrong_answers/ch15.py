"""Wrong answers to the exercises of chapter 15, and what each must be told."""

from tests.wrong_answers import WrongAnswer, chapter, swap_all
from tplab.course.notebooks.rewrite import keep_solution


def solution(exercise: str) -> str:
    return keep_solution(chapter(15).of_role("exercise")[exercise].text) + "\n"


def changed(exercise: str, *pairs: tuple[str, str]) -> str:
    return swap_all(solution(exercise), *pairs)


def rate(*pairs: tuple[str, str]) -> str:
    return changed("15.1", *pairs)


UP = "return highest * step / warmup"
PART = "part = (step - warmup) / (steps - warmup)"
DOWN = "return lowest + (highest - lowest) * (1 + math.cos(math.pi * part)) / 2"

RATE = [
    ("the first step has none", rate((UP, "return highest * (step - 1) / warmup"), ("if step <= warmup:", "if step <= warmup + 1 and warmup:")), "computes a gradient and does nothing with it"),
    ("no warm-up", rate(("if step <= warmup:", "if step < 0:"), (PART, "part = max(0.0, (step - warmup) / (steps - warmup))")), "There is no warm-up"),
    ("the cosine takes all steps", rate((PART, "part = step / steps")), "The cosine begins when the warm-up is over"),
    ("the cosine begins at 0 of all steps", rate((PART, "part = (step - 1) / steps")), "The cosine begins when the warm-up is over"),
    ("one step late", rate((PART, "part = (step - 1 - warmup) / (steps - warmup)")), "the last one is step `steps`"),
    ("down to zero", rate((DOWN, "return highest * (1 + math.cos(math.pi * part)) / 2")), "Where is the lowest rate in your sum"),
    ("to zero and cut off", rate((DOWN, "return max(lowest, highest * (1 + math.cos(math.pi * part)) / 2)")), "is cut off at the lowest rate, so the last steps are flat"),
    ("a quarter of a cosine", rate((DOWN, "return lowest + (highest - lowest) * math.cos(math.pi / 2 * part)")), "That is a quarter of a cosine"),
    ("a straight line", rate((DOWN, "return lowest + (highest - lowest) * (1 - part)")), "turns it into a cosine"),
    ("not halved", rate((DOWN, "return lowest + (highest - lowest) * (1 + math.cos(math.pi * part))")), "What makes that a part between 1 and 0"),
    ("the lowest on top", rate((DOWN, "return lowest + highest * (1 + math.cos(math.pi * part)) / 2")), "How high is it above the lowest at its beginning"),
    ("up again after the end", rate(("if step > steps:", "if steps == warmup:")), "What does your cosine do after its end"),
    ("divides by no warm-up", rate(("if step <= warmup:", "if step <= max(warmup, 1):")), "A length of 0 is allowed for both"),
    ("divides by no cosine", rate(("if step <= warmup:", "if step < warmup:")), "A length of 0 is allowed for both"),
    ("the warm-up begins at the lowest", rate((UP, "return lowest + (highest - lowest) * step / warmup")), "begins at 0 and not at the lowest rate"),
    ("the highest rate comes behind the warm-up", rate((UP, "return highest * step / (warmup + 1)")), "What has step k"),
    ("the cosine begins with all of it", rate((PART, "part = (step - warmup - 1) / max(steps - warmup - 1, 1)")), "Write the rate of a few steps by hand"),
    ("nothing is returned", rate((DOWN, DOWN.replace("return", "rate ="))), "Is there a `return` on every way"),
]  # fmt: skip


def windows(*pairs: tuple[str, str]) -> str:
    return changed("15.2", *pairs)


ORDER = "order = torch.randperm(windows, generator=generator).tolist()"
MAKE = "generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)"
FIRST = "first = done * batch_size + replica * each"
PLACE = "epoch, place = divmod(number, windows)"

WINDOWS = [
    ("the rank's own random numbers", windows((ORDER, "order = torch.randperm(windows).tolist()")), "Which generator could belong to your function alone"),
    ("sets the seed of the rank", windows((MAKE, "torch.manual_seed(1_000_003 * seed + epoch)"), ("torch.randperm(windows, generator=generator)", "torch.randperm(windows)")), "Which generator could belong to your function alone"),
    ("not shuffled", windows((ORDER, "order = list(range(windows))")), "What shuffles them"),
    ("the same order in each epoch", windows((MAKE, "generator = torch.Generator().manual_seed(seed)")), "What would have to enter the seed"),
    ("the seed has no effect", windows((MAKE, "generator = torch.Generator().manual_seed(epoch)")), "Where does it enter the order"),
    ("seed plus epoch", windows((MAKE, "generator = torch.Generator().manual_seed(seed + epoch)")), "goes through epochs of this run again"),
    ("ten times the seed, plus epoch", windows((MAKE, "generator = torch.Generator().manual_seed(10 * seed + epoch)")), "goes through epochs of this run again"),
    ("seed and epoch by bits", windows((MAKE, "generator = torch.Generator().manual_seed((seed << 4) ^ epoch)")), "goes through epochs of this run again"),
    ("seed plus a thousand epochs", windows((MAKE, "generator = torch.Generator().manual_seed(seed + 1000 * epoch)")), "goes through epochs of this run again"),
    ("one order that turns", windows((MAKE, "generator = torch.Generator().manual_seed(seed)"), (PLACE, "epoch, place = number // windows, (number + number // windows) % windows")), "the same windows meet for the whole run"),
    ("one order there and back", windows((MAKE, "generator = torch.Generator().manual_seed(seed)"), ("mine.append(order[place])", "mine.append(order[place if epoch % 2 == 0 else -1 - place])")), "the same windows meet for the whole run"),
    ("whole batches are shuffled", windows((ORDER, "batches = windows // batch_size\n        blocks = torch.randperm(batches, generator=generator).tolist()\n        order = [b * batch_size + i for b in blocks for i in range(batch_size)] + list(range(batches * batch_size, windows))"),), "the same windows meet for the whole run"),
    ("seed times epoch", windows((MAKE, "generator = torch.Generator().manual_seed((seed + 1) * epoch)")), "goes through epochs of this run again"),
    ("the seed beyond 32 bits", windows((MAKE, "generator = torch.Generator().manual_seed((seed << 32) + epoch)")), "only the lowest 32 bits"),
    ("a tensor", windows(("return mine", "return torch.tensor(mine)")), "makes a list of a tensor"),
    ("a list of tensors", windows(("generator=generator).tolist()", "generator=generator)")), "makes a list of a tensor"),
    ("each replica shuffles for itself", windows((MAKE, "generator = torch.Generator().manual_seed(1_000_003 * seed + epoch + 1000 * replica)")), "Does each replica see the same order"),
    ("drawn with replacement", windows((ORDER, "order = torch.randint(windows, (windows,), generator=generator).tolist()")), "Number all sequences of the run"),
    ("what is left over at the end is dropped", windows((FIRST, "per_epoch = windows // batch_size\n    first = done // per_epoch * windows + done % per_epoch * batch_size + replica * each")), "Number all sequences of the run"),
    ("goes on in the old order", windows((PLACE, "epoch, place = done * batch_size // windows, number % windows")), "Number all sequences of the run"),
    ("all of the batch", windows(("each = batch_size // replicas", "each = batch_size"), (FIRST, "first = done * batch_size")), "How many of them are one replica's"),
    ("counts its calls", "calls = {}\n\n\n" + windows((FIRST, "calls[replica, seed, windows] = calls.get((replica, seed, windows), -1) + 1\n    first = calls[replica, seed, windows] * batch_size + replica * each")).replace("def own_windows(", "def own_windows(", 1), "What does your function remember from one call"),
    ("numbered from 1", windows(("mine.append(order[place])", "mine.append(order[place] + 1)")), "Windows are numbered from 0"),
    ("beyond the order", windows(("order[place]", "order[number]")), "Which line expects the order to be longer"),
]  # fmt: skip


def step(*pairs: tuple[str, str]) -> str:
    return changed("15.3", *pairs)


ZERO = "    optimizer.zero_grad()\n"
LOSS = "loss = model(x, y) / len(micro_batches)"
SUM = "    allreduce_sequence_parallel_gradients(model, tp)\n"
OVER_DP = "    for param in model.parameters():\n        dist.all_reduce(param.grad, group=dp)\n        param.grad /= dist.get_world_size(dp)\n"
CLIP = "    norm = clip_grad_norm(model.parameters(), max_norm, mesh)\n"
STEP = "    optimizer.step()\n"
MEAN = "    dist.all_reduce(total, group=dp)\n"
RESULT = "return total.item() / dist.get_world_size(dp), norm.item()"
BACK = "        loss.backward()\n"

STEPS = [
    ("forgets 1/m", step((LOSS, "loss = model(x, y)"), (RESULT, "return total.item() / len(micro_batches) / dist.get_world_size(dp), norm.item()")), "What turns the sum of m means into their mean"),
    ("sum over the replicas", step(("        param.grad /= dist.get_world_size(dp)\n", "")), "what makes one mean of them"),
    ("nothing goes over dp", step((OVER_DP, "")), "Each replica has learned from its own sequences"),
    ("averages over all ranks", step(("dist.all_reduce(param.grad, group=dp)\n        param.grad /= dist.get_world_size(dp)", "dist.all_reduce(param.grad)\n        param.grad /= dist.get_world_size()")), "Each of these ranks has other columns and rows"),
    ("the hook's mistake: the parameter is averaged", step(("dist.all_reduce(param.grad, group=dp)\n        param.grad /=", "dist.all_reduce(param.data, group=dp)\n        param.data /=")), "Each replica has learned from its own sequences"),
    ("forgets the optimizer", step((STEP, "")), "Who changes them, and which line"),
    ("divides by the micro-batches twice", step((OVER_DP, OVER_DP + "        param.grad /= len(micro_batches)\n")), "by the number of micro-batches. How often do you divide"),
    ("only the optimizer's first group of parameters", step((OVER_DP, OVER_DP.replace("model.parameters()", "optimizer.param_groups[0]['params']"))), "does your loop go over"),
    ("gradients that are zero are not sent", step((OVER_DP, OVER_DP.replace("        dist", "        if not param.grad.any():\n            continue\n        dist", 1))), "because of the values of a tensor"),
    ("divides by the replicas twice", step((LOSS, "loss = model(x, y) / len(micro_batches) / dist.get_world_size(dp)"), (RESULT, "return total.item(), norm.item()")), "by the number of replicas. How often do you divide"),
    ("sends the sequences of rank 0 to all", step((LOSS, "dist.broadcast(x, 0)\n        dist.broadcast(y, 0)\n        " + LOSS)), "Which line of yours writes into them"),
    ("the groups as attributes", step(('mesh.get_group("tp"), mesh.get_group("dp")', "mesh.tp, mesh.dp")), "are the groups of this rank"),
    ("zeroes for each micro-batch", step((ZERO, ""), (BACK, "        optimizer.zero_grad()\n" + BACK)), "The micro-batches before the last one have no effect"),
    ("never zeroes", step((ZERO, "")), "that the second has to get rid of"),
    ("steps after each micro-batch", step((BACK, BACK + "        for param in model.parameters():\n            dist.all_reduce(param.grad, group=dp)\n            param.grad /= dist.get_world_size(dp)\n        allreduce_sequence_parallel_gradients(model, tp)\n        norm = clip_grad_norm(model.parameters(), max_norm, mesh)\n        optimizer.step()\n        optimizer.zero_grad()\n"), (SUM + OVER_DP + CLIP + STEP, "")), "After which of them does the optimizer step"),
    ("does not clip", step((CLIP, "    norm = grad_norm(model.parameters(), mesh)\n"), ("    tp, dp =", "    from tplab.data.grad_norm import grad_norm\n\n    tp, dp =")), "When is it shortened"),
    ("clips what this rank has", step((CLIP, "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n")), "Whose parts come in over which group"),
    ("counts replicated ones on every rank", step((CLIP, "    square = sum(param.grad.square().sum() for param in model.parameters())\n    dist.all_reduce(square, group=tp)\n    norm = square.sqrt()\n    for param in model.parameters():\n        param.grad *= min(1.0, max_norm / (norm.item() + 1e-6))\n")), "Which of the ranks counts them"),
    ("brings every gradient to max_norm", step((CLIP, CLIP + "    for param in model.parameters():\n        param.grad *= max_norm / norm.clamp(max=max_norm)\n")), "Which of them does yours do in another order"),
    ("the norm after clipping", step((CLIP, CLIP + "    norm = norm.clamp(max=max_norm)\n")), "The log wants to know how long it was"),
    ("marked gradients are not added up", step((SUM, "")), "which of these parameters are marked"),
    ("marked gradients are added up behind the norm", step((SUM, ""), (CLIP, CLIP + SUM)), "and take the norm"),
    ("marked gradients are added up for each micro-batch", step((SUM, ""), (BACK, BACK + "        allreduce_sequence_parallel_gradients(model, tp)\n")), "once a step or once a micro-batch"),
    ("everything that is whole is added up over tp", step((SUM, "    for param in model.parameters():\n        if not hasattr(param, 'tensor_parallel'):\n            dist.all_reduce(param.grad, group=tp)\n")), "which of these parameters are marked"),
    ("averages over tp what is the same there", step((SUM, SUM + "    for param in model.parameters():\n        if not hasattr(param, 'tensor_parallel') and not hasattr(param, 'sequence_parallel'):\n            dist.all_reduce(param.grad, group=tp)\n            param.grad /= dist.get_world_size(tp)\n")), "Which gradients are whole there already"),
    ("averages for each micro-batch", step((OVER_DP, ""), (BACK, "        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]\n        for p in model.parameters():\n            p.grad = None\n" + BACK + "        for p, b in zip(model.parameters(), before):\n            dist.all_reduce(p.grad, group=dp)\n            p.grad /= dist.get_world_size(dp)\n            if b is not None:\n                p.grad += b\n")), "how often does it have to travel then"),
    ("the loss of this replica", step((MEAN, ""), (RESULT, "return total.item(), norm.item()")), "That is the loss of this replica"),
    ("the loss of the last micro-batch", step((RESULT, "return loss.item(), norm.item()")), "That is the loss of the last micro-batch"),
    ("the loss summed over the micro-batches", step((LOSS, "loss = model(x, y)"), (BACK, "        (loss / len(micro_batches)).backward()\n")), "What is the mean over all of them"),
    ("the loss summed over the replicas", step((RESULT, "return total.item(), norm.item()")), "How many replicas are there"),
    ("one rank asks for the loss", step((MEAN, "    if dist.get_rank() == 0:\n        dist.all_reduce(total, group=dp)\n")), "Which of yours depends on the rank"),
    ("the loss summed over the world", step((MEAN, "    dist.all_reduce(total)\n")), "It is the same on all ranks of `tp` already"),
    ("always two micro-batches", step(("len(micro_batches)", "2")), "is it that of the micro-batches"),
    ("tensors", step((RESULT, "return total / dist.get_world_size(dp), norm")), "what makes a float of a tensor with one number"),
    ("only the loss", step((RESULT, "return total.item() / dist.get_world_size(dp)")), "What comes out are two numbers"),
]  # fmt: skip


def saving(*pairs: tuple[str, str]) -> str:
    return changed("15.4", *pairs)


UNFINISHED = 'unfinished = folder / f"step-{step:06d}.saving"'
CLEAR = (
    '    for left in [*folder.glob("step-*.saving"), *folder.glob("step-*.deleting")]:\n        shutil.rmtree(left)\n'
)
RENAME = '    unfinished.rename(folder / f"step-{step:06d}")\n'
OLD = "        old.rename(deleting)\n        shutil.rmtree(deleting)\n"
FOUND = "return (complete_checkpoints(folder) or [None])[-1]"
SORTED = "return sorted(found, key=lambda path: int(path.name[5:]))"
NAMED = 're.fullmatch(r"step-\\d{6,}", path.name)'

SAVING = [
    ("written under its own name", saving((UNFINISHED, 'unfinished = folder / f"step-{step:06d}"'), (RENAME, "")), "Under which name should files be written"),
    ("made elsewhere and moved", saving((UNFINISHED, 'unfinished = Path(tempfile.mkdtemp()) / "saving"'), (RENAME, '    shutil.move(unfinished, folder / f"step-{step:06d}")\n'), ("def complete_checkpoints", "import tempfile\n\n\ndef complete_checkpoints")), "Where should the unfinished directory lie"),
    ("renamed before it is written", saving(("    write(unfinished)\n" + RENAME, RENAME + '    write(folder / f"step-{step:06d}")\n')), "Under which name should files be written"),
    ("leftovers stand in the way", saving((CLEAR, "")), "finds it in its way"),
    ("writes into what a killed save has left", saving((CLEAR, ""), ("    unfinished.mkdir()\n", "    unfinished.mkdir(exist_ok=True)\n"), ("        shutil.rmtree(deleting)\n", "        shutil.rmtree(deleting)\n" + CLEAR)), "held files of a killed save"),
    ("leftovers are never removed", saving((CLEAR, ""), (UNFINISHED, 'unfinished = folder / f"step-{step:06d}.saving-{len(list(folder.iterdir()))}"')), "nothing that a killed save has left"),
    ("clears what the same step has left", saving((CLEAR, '    shutil.rmtree(folder / f"step-{step:06d}.saving", ignore_errors=True)\n    for left in folder.glob("step-*.deleting"):\n        shutil.rmtree(left)\n')), "restarted run may save at other steps"),
    ("deletes file by file under its name", saving((OLD, "        shutil.rmtree(old)\n")), "How can its name be gone"),
    ("deletes before it saves", saving(("    unfinished.mkdir()\n    write(unfinished)\n" + RENAME, ""), (OLD, OLD + "    unfinished.mkdir()\n    write(unfinished)\n" + RENAME), ("[:-keep]", "[: len(complete_checkpoints(folder)) + 1 - keep]")), "In which order do the two happen"),
    ("keeps one too few", saving(("[:-keep]", "[: 1 - keep or None]")), "What is too much in it, or missing"),
    ("deletes the newest", saving(("complete_checkpoints(folder)[:-keep]", "complete_checkpoints(folder)[keep:]")), "What is too much in it, or missing"),
    ("deletes all that it does not know", saving((CLEAR, "    for left in folder.iterdir():\n        if left not in complete_checkpoints(folder):\n            shutil.rmtree(left) if left.is_dir() else left.unlink()\n")), "may delete"),
    ("another program deletes", saving(('shutil.rmtree(deleting)', 'os.system(f"rm -rf {deleting}")'), ("def complete_checkpoints", "import os\n\n\ndef complete_checkpoints")), "os.system starts another program"),
    ("the folder alone is made", saving(("folder.mkdir(parents=True, exist_ok=True)", "folder.mkdir(exist_ok=True)")), "The folder may not be there yet"),
    ("removes every directory that ends in .saving", saving((CLEAR, '    for left in [*folder.glob("*.saving"), *folder.glob("*.deleting")]:\n        shutil.rmtree(left, ignore_errors=True)\n')), "directory that it did not create"),
    ("removes files called like leftovers", saving((CLEAR, '    for left in folder.glob("step-*.*"):\n        shutil.rmtree(left) if left.is_dir() else left.unlink()\n')), "may delete"),
    ("the newest as a name", saving((FOUND, "found = complete_checkpoints(folder)\n    return found[-1].name if found else None")), "It is the right one, but a text"),
    ("newest by name as text", saving((SORTED, "return sorted(found)")), "By what are checkpoints sorted"),
    ("newest by date", saving((FOUND, "return max(complete_checkpoints(folder), key=lambda path: path.stat().st_mtime, default=None)")), "by what the newest"),
    ("the newest as a text", saving((FOUND, "found = complete_checkpoints(folder)\n    return str(found[-1]) if found else None")), "It is the right one, but a text"),
    ("the last one in the folder", saving((FOUND, "return sorted(folder.iterdir())[-1] if folder.is_dir() and any(folder.iterdir()) else None")), "by what does it know a complete one"),
    ("raises where there is no folder", saving((" if folder.is_dir() else []", "")), "The folder may not be there yet"),
]  # fmt: skip


def use(*pairs: tuple[str, str]) -> str:
    return changed("15.5", *pairs)


WEIGHTS = "weights = 24 * config.num_layers * h * h"
SCORES = "scores = 4 * config.num_layers * config.seq_length * h"
LOGITS = "logits = 2 * h * config.vocab_size"
MODEL = "model = 3 * (weights + scores + logits)"
HARDWARE = "hardware = model + (weights + scores if layers_again else 0)"
POSSIBLE = "possible = gpus * peak"

USE = [
    ("no scores", use((SCORES, "scores = 0")), "Where are they"),
    ("one of the two products of the scores", use((SCORES, SCORES.replace("4 *", "2 *"))), "P V as many"),
    ("half of the scores for the mask", use((SCORES, "scores = 2 * config.num_layers * (config.seq_length + 1) * h")), "leave out what the mask hides"),
    ("no output layer", use((LOGITS, "logits = 0")), "The output layer multiplies too"),
    ("the look-up too", use((LOGITS, LOGITS.replace("2 *", "4 *"))), "copies a row of its table"),
    ("the forward pass alone", use((MODEL, "model = weights + scores + logits")), "two products where the forward pass has one"),
    ("a backward pass like the forward pass", use((MODEL, MODEL.replace("3 *", "2 *"))), "How many products are they"),
    ("multiplications only", use((MODEL, MODEL.replace("3 *", "1.5 *"))), "are two operations"),
    ("the peak of one GPU", use((POSSIBLE, "possible = peak")), "What could all of them compute"),
    ("divided by the GPUs twice", use((POSSIBLE, "possible = gpus * gpus * peak")), "How often do the GPUs count"),
    ("counts what is computed again", use((MODEL, "model = (4 if layers_again else 3) * (weights + scores + logits)")), "brings the model no further"),
    ("counts the layers again", use((HARDWARE, HARDWARE + "\n    model = hardware")), "brings the model no further"),
    ("hardware like the model", use((HARDWARE, "hardware = model")), "How often do the products of a layer's forward pass count"),
    ("the output layer again", use((HARDWARE, "hardware = model * (4 / 3 if layers_again else 1)")), "Which product of the forward pass does not lie in a layer"),
    ("the layers again, without their scores", use((HARDWARE, "hardware = model + (weights if layers_again else 0)")), "Which products does the hardware do once more"),
    ("the MLP without its second matrix", use((WEIGHTS, WEIGHTS.replace("24", "16"))), "Write the products of one token's forward pass"),
    ("never more than 1", use(("return model * tokens_per_second / possible, hardware * tokens_per_second / possible", "return tuple(min(1.0, flops * tokens_per_second / possible) for flops in (model, hardware))")), "Which of your lines limits the result"),
    ("percent", use((POSSIBLE, "possible = gpus * peak / 100")), "Which part of 1"),
    ("one number", use(("return model * tokens_per_second / possible, hardware * tokens_per_second / possible", "return model * tokens_per_second / possible")), "What comes out are two numbers"),
]  # fmt: skip

OTHERS = [
    ("15.3", "empties the caller's list", changed("15.3", ("    norm = clip_grad_norm", "    micro_batches.clear()\n    norm = clip_grad_norm")), "wrote into micro_batches"),
    ("15.2", "a hash that differs between processes", changed("15.2", ("manual_seed(1_000_003 * seed + epoch)", 'manual_seed(abs(hash(f"{seed} {epoch}")))')), "Which line calls `hash`"),
    ("15.4", "swallows an error", changed("15.4", ("    write(unfinished)\n", "    try:\n        write(unfinished)\n    except OSError:\n        pass\n")), "the error reach the caller"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("15.1", RATE), ("15.2", WINDOWS), ("15.3", STEPS), ("15.4", SAVING), ("15.5", USE))
    for name, source, says in answers
]
WRONG += [WrongAnswer(*other) for other in OTHERS]
