"""Wrong answers to the exercises of chapter 14, and what each must be told."""

from tests.wrong_answers import WrongAnswer, chapter, swap_all
from tplab.course.notebooks.rewrite import keep_solution


def solution(exercise: str) -> str:
    return keep_solution(chapter(14).of_role("exercise")[exercise].text) + "\n"


def changed(exercise: str, *pairs: tuple[str, str]) -> str:
    return swap_all(solution(exercise), *pairs)


def buckets(*pairs: tuple[str, str]) -> str:
    return changed("14.1", *pairs)


FULL = "if self.arrived[number] == len(bucket):"
START = "self.running.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))"
FLAT = "flat = torch.cat([param.grad.flatten() for param in bucket])"
WAIT = "for bucket, flat, work in self.running:"
IN_FINISH = f"""for bucket in self.buckets:
            {FLAT}
            {START}
        {WAIT}"""

BUCKETS = [
    ("the sum is not divided", buckets((" / total.item()", "")), "Which number turns them into those of the mean"),
    ("divided by the number of ranks", buckets((" / total.item()", " / dist.get_world_size(self.group)")), "What has the number of ranks to do with it"),
    ("divided by this rank's tokens", buckets((" / total.item()", " / tokens")), "How does a rank learn the tokens of the others"),
    ("each rank's mean, averaged", buckets(("param.grad.copy_(part.view_as(param) / total.item())", "dist.all_reduce(param.grad.div_(tokens * dist.get_world_size(self.group)), group=self.group)")), "What is left to send is one number"),
    ("the hook reduces the parameter", buckets((FLAT, "flat = torch.cat([param.grad.flatten() for param in bucket])\n            dist.all_reduce(param.data, group=self.group)")), "Which of the two did you hand to all_reduce"),
    ("everything in finish", buckets((FULL, "if False:"), (WAIT, IN_FINISH)), "during backward, that a gradient is ready"),
    ("synchronous", buckets(("dist.all_reduce(flat, group=self.group, async_op=True)))", "dist.all_reduce(flat, group=self.group)))"), ("            work.wait()\n", "")), "Which argument of dist.all_reduce makes it return at once"),
    ("one all-reduce for each parameter", buckets((FULL, "if True:\n            bucket = [param]")), "Each bucket is one all-reduce"),
    ("starts at the first gradient of a bucket", buckets((FULL, "if self.arrived[number] == 1:"), (FLAT, "flat = torch.cat([(torch.zeros_like(param) if param.grad is None else param.grad).flatten() for param in bucket])")), "In which order did you put them in"),
    ("never set back", solution("14.1").rsplit("        self.arrived = [0]", 1)[0], "that `finish` must set back"),
    ("a rank without tokens returns at once", buckets(("        total = torch.tensor(float(tokens)", "        if tokens == 0:\n            return\n        total = torch.tensor(float(tokens)")), "Which of your lines makes this rank return early"),
    ("never waits", buckets(("            work.wait()\n", "")), "What should you do with that request"),
    ("the result stays in the flat tensor", buckets(("param.grad.copy_(part.view_as(param) / total.item())", "part.div_(total.item())")), "Which tensor did the all-reduce write into"),
    ("a list that all objects share", buckets(("        self.running = []\n        for number", "        for number"), ("        self.running = []\n", "        self.running.clear()\n"), ("    def __init__", "    running = []\n\n    def __init__")), "keeps its value between calls"),
    ("put back in another order", buckets(("parts = flat.split([param.numel() for param in bucket])", "bucket = bucket[::-1]\n            parts = flat.split([param.numel() for param in bucket])")), "In which order did you put them in"),
    ("the default group", buckets(("dist.all_reduce(flat, group=self.group, async_op=True)", "dist.all_reduce(flat, async_op=True)")), "which all-reduce was not given `group`"),
    ("one rank adds up the tokens", buckets(("        dist.all_reduce(total, group=self.group)\n", "        if dist.get_rank(self.group) == 0:\n            dist.all_reduce(total, group=self.group)\n")), "Every rank must start the same all-reduces"),
    ("tokens in the dtype of the gradients", buckets(("total = torch.tensor(float(tokens), dtype=torch.float64, device=device())", "total = torch.tensor(float(tokens), dtype=self.buckets[0][0].dtype, device=device())")), "in bfloat16, which rounds"),
    ("tokens in float16", buckets(("dtype=torch.float64, device=device())", "dtype=torch.float16, device=device())")), "Which dtype can hold"),
    ("no communication", buckets((START, "self.running.append((bucket, flat, None))"), ("            work.wait()\n", "")), "Each bucket is one all-reduce"),
]  # fmt: skip


def zero(*pairs: tuple[str, str]) -> str:
    return changed("14.2", *pairs)


SCATTER = "dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group=self.group)"
GATHER = "dist.all_gather(parts, self.shard.detach(), group=self.group)"
OWN = "dist.get_rank(self.group) * self.length"
SLICE = f"{OWN} : ({OWN.replace('dist', '1 * dist', 1)}) + self.length"

ZERO = [
    ("averages the gradients", zero(("        self.optimizer.step()", "        self.shard.grad /= dist.get_world_size(self.group)\n        self.optimizer.step()")), "Where do you divide"),
    ("an all-reduce in place of the reduce-scatter", zero((SCATTER, f"dist.all_reduce(gradients, group=self.group)\n        self.shard.grad = gradients[{SLICE}].clone()")), "What else do you send"),
    ("a whole optimizer on every rank", zero(("optimizer_class([self.shard], **options)", "optimizer_class([nn.Parameter(flat.clone())], **options)"), (SCATTER, "dist.all_reduce(gradients, group=self.group)\n        whole = self.optimizer.param_groups[0]['params'][0]\n        whole.grad = gradients"), (GATHER, "parts = [whole.detach()]")), "Which parameters did you give it"),
    ("keeps everything, updates its part", zero(("self.optimizer = optimizer_class([self.shard], **options)", "self.rest = nn.Parameter(flat.clone())\n        self.rest.grad = torch.zeros_like(flat)\n        self.optimizer = optimizer_class([self.shard, self.rest], **options)")), "Which parameters did you give it"),
    ("does not add up", zero((SCATTER, f"self.shard.grad = gradients[{SLICE}].clone()")), "Which collective adds up those of all ranks"),
    ("does not gather the weights", zero((GATHER, f"old = self.flatten([param.detach() for param in self.parameters])\n        old[{SLICE}] = self.shard.detach()\n        parts = [old]")), "Who tells it theirs"),
    ("no padding", zero(("return F.pad(flat, (0, dist.get_world_size(self.group) * self.length - len(flat)))  # [p · length]", "return flat"), ("-(-numbers // p)", "numbers // p")), "which neither 2 nor 4 divides"),
    ("binds a name, writes into no parameter", zero(("param.data.copy_(weights[place : place + param.numel()].view_as(param))", "param = weights[place : place + param.numel()].view_as(param)")), "who brings the new values back"),
    ("zeros in the default dtype", zero(("return F.pad(flat, (0, dist.get_world_size(self.group) * self.length - len(flat)))", "return torch.cat([flat, torch.zeros(dist.get_world_size(self.group) * self.length - len(flat), device=flat.device)])")), "for float64 and float32 tensors, but not for bfloat16"),
    ("zeros in front", zero(("F.pad(flat, (0, dist", "F.pad(flat, (dist"), ("self.length - len(flat)))", "self.length - len(flat), 0))")), "Follow one number"),
    ("an all-gather for each parameter", zero((GATHER, GATHER + "\n        for param in self.parameters:\n            dist.all_gather([torch.empty_like(param.data) for _ in range(dist.get_world_size(self.group))], param.data, group=self.group)")), "What else do you send"),
    ("a new optimizer in every step", zero(("self.optimizer = optimizer_class([self.shard], **options)", "self.make = lambda: optimizer_class([self.shard], **options)\n        self.optimizer = self.make()"), ("        self.optimizer.step()", "        self.optimizer = self.make()\n        self.optimizer.step()")), "the state that the optimizer kept"),
    ("takes the shard from the start again", zero(("self.shard = nn.Parameter(", "self.start = flat\n        self.shard = nn.Parameter("), ("        self.optimizer.step()", "        with torch.no_grad():\n            self.shard.copy_(self.start[dist.get_rank(self.group) * self.length :][: self.length])\n        self.optimizer.step()")), "What does the second one start from"),
    ("the optimizer has another name", zero(("self.optimizer", "self.adam")), "`self.optimizer` should be an"),
    ("ignores the options", zero(("optimizer_class([self.shard], **options)", "optimizer_class([self.shard], lr=options['lr'])")), "did the options reach it"),
    ("the default group", zero((", group=self.group)\n        self.optimizer", ")\n        self.optimizer")), "was not given `group`"),
]  # fmt: skip


def mesh(*pairs: tuple[str, str]) -> str:
    return changed("14.3", *pairs)


PLACE = '{"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}'
LOOP = """for ranks in axis_groups(axis, dp, pp, tp):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group"""

MESH = [
    ("tp outermost", mesh((PLACE, '{"dp": rank % dp, "pp": rank // dp % pp, "tp": rank // (dp * pp)}')), "should be between neighbours"),
    ("dp and pp change places", mesh((PLACE, '{"dp": rank // tp % dp, "pp": rank // (dp * tp), "tp": rank % tp}')), "Which one moves slowest"),
    ("no remainder for pp", mesh((PLACE, '{"dp": rank // (pp * tp), "pp": rank // tp, "tp": rank % tp}')), "what is left over"),
    ("groups of ranks that agree in the axis", mesh(("del place[axis]", "place = {axis: place[axis]}")), "differ in this one"),
    ("only the groups of rank 0", mesh(("return list(groups.values())", "return list(groups.values())[:1]")), "Which ranks are missing in yours"),
    ("groups of one rank are left out", mesh(("return list(groups.values())", "return [group for group in groups.values() if len(group) > 1]")), "Which ranks are missing in yours"),
    ("neighbours for every axis", mesh(("return list(groups.values())", "size = {'dp': dp, 'pp': pp, 'tp': tp}[axis]\n    return [list(range(first, first + size)) for first in range(0, dp * pp * tp, size)]")), "How far apart are the ranks of a pipeline"),
    ("the order is turned round", mesh(("return list(groups.values())", "return [group[::-1] for group in groups.values()]")), "they stand in its order"),
    ("returns a dictionary", mesh(("return list(groups.values())", "return groups"), ("in axis_groups(axis, dp, pp, tp):", "in axis_groups(axis, dp, pp, tp).values():")), "What does each last line return"),
    ("new_group by its members only", mesh((LOOP, "for ranks in axis_groups(axis, dp, pp, tp):\n        if dist.get_rank() in ranks:\n            mine = dist.new_group(ranks)")), "also by those who are not in it"),
    ("asks a group that it is not in", mesh(("        if dist.get_rank() in ranks:\n", "        if group.rank() >= 0:\n")), "What does it return there, and what do you do with that"),
    ("the last group made", mesh(("        if dist.get_rank() in ranks:\n            mine = group", "        mine = group")), "Which of them do you return"),
    ("the default group", mesh((LOOP, "mine = dist.group.WORLD")), "does each keep the one with its own rank"),
    ("always the tp group", mesh(("axis_groups(axis, dp, pp, tp):\n        group", 'axis_groups("tp", dp, pp, tp):\n        group')), "does each keep the one with its own rank"),
]  # fmt: skip


def norm(*pairs: tuple[str, str]) -> str:
    return changed("14.4", *pairs)


SQUARES = "total += param.grad.double().square().sum()"
ROOT = "return math.sqrt(total.item())"
BOTH = "    dist.all_reduce(total, group=tp_group)\n    dist.all_reduce(total, group=pp_group)\n"

NORM = [
    ("replicated ones on every rank", norm(("mine = hasattr(param, \"tensor_parallel\") or dist.get_rank(tp_group) == 0", "mine = True")), "counts tp times"),
    ("no replicated ones", norm((' or dist.get_rank(tp_group) == 0', "")), "Which one of the ranks counts them"),
    ("shards of rank 0 only", norm(('mine = hasattr(param, "tensor_parallel") or dist', "mine = dist")), "Over which group do the parts of the others come in"),
    ("not over tp", norm(("    dist.all_reduce(total, group=tp_group)\n", "")), "Over which group do the parts of the others come in"),
    ("not over pp", norm(("    dist.all_reduce(total, group=pp_group)\n", "")), "Over which group do the other stages' parts come in"),
    ("nothing is sent", norm((BOTH, "")), "Over which group"),
    ("both copies of the table", norm(("first_copy = param is not tied or dist.get_rank(pp_group) == 0", "first_copy = True")), "On which of the two stages does it count"),
    ("the table on every tensor-parallel rank", norm(("or dist.get_rank(tp_group) == 0", "or param is tied or dist.get_rank(tp_group) == 0")), "Which one of these four ranks"),
    ("no copy of the table", norm(("first_copy = param is not tied or dist.get_rank(pp_group) == 0", "first_copy = param is not tied")), "No rank counts the shared table"),
    ("the table skipped on the last stage, which may be the first", norm(("dist.get_rank(pp_group) == 0", "dist.get_rank(pp_group) < dist.get_world_size(pp_group) - 1")), "even if that stage is also the last one"),
    ("over all ranks, replicas too", norm((BOTH, "    dist.all_reduce(total)\n")), "Over which ranks do you add up"),
    ("one rank adds up what is replicated", norm((BOTH, "    if dist.get_rank(tp_group) == 0:\n        dist.all_reduce(torch.zeros_like(total), group=tp_group)\n" + BOTH)), "also one that has nothing of its own to add"),
    ("no root", norm((ROOT, "return total.item()")), "What is still to be done with the sum"),
    ("the sum of the norms", norm((BOTH, "    total = total.sqrt()\n" + BOTH), (ROOT, "return total.item()")), "when is the root taken"),
    ("a tensor", norm((ROOT, "return total.sqrt()")), "plain float"),
    ("a parameter without gradient is not expected", norm(("param.grad is not None and ", "")), "Which line expects one of them"),
    ("gathers the shards", norm((SQUARES, "parts = [torch.empty_like(param.grad) for _ in range(dist.get_world_size(tp_group))]\n            dist.all_gather(parts, param.grad, group=tp_group)\n            total += (torch.stack(parts) if hasattr(param, 'tensor_parallel') else param.grad).double().square().sum()"), (" and first_copy and mine", " and first_copy"), ("    dist.all_reduce(total, group=tp_group)\n", "")), "One number from each rank is enough"),
    ("squares the gradients in place", norm((SQUARES, "total += param.grad.square_().sum()")), "Which line of yours writes into one"),
    ("float32", norm((".double()", ".float()")), "rounded, for example by a cast to float32"),
    ("squares in float16", norm((".double()", "")), "In which dtype do you square"),
    ("the table by its shape", norm(("param is not tied", "tied is None or param.shape != tied.shape")), "whether a parameter is `tied` itself"),
    ("goes through the parameters twice", norm(("    for param in parameters:", "    if not any([param.grad is not None for param in parameters]):\n        return 0.0\n    for param in parameters:")), "which can be gone through only once"),
    ("needs at least one gradient", norm(("    total = torch.zeros((), dtype=torch.float64, device=device())\n", "    squares = []\n"), (SQUARES, "squares.append(param.grad.double().square().sum())"), (BOTH, "    total = torch.stack(squares).sum()\n" + BOTH)), "stack expects a non-empty TensorList"),
    ("only rank 0 knows", norm((ROOT, "return math.sqrt(total.item()) if dist.get_rank() == 0 else 0.0")), "Go through the parameters of one rank"),
]  # fmt: skip


def layouts(*pairs: tuple[str, str]) -> str:
    return changed("14.5", *pairs)


CONDITION = "if rest or dp == 0 or gpus_per_node % tp or sequences % dp:"

LAYOUTS = [
    ("not all GPUs", layouts((CONDITION, CONDITION.replace("rest or ", "")), ("min(fitting, key=seconds)", "min(fitting, key=lambda l: l.dp * l.pp * l.tp)")), "A GPU that is in no group does nothing"),
    ("does not look at the memory", layouts(("if bill(config, layout).total <= gpu_bytes:", "if True:")), "With what do you compare them"),
    ("the first stage's bill", layouts(("bill(config, layout)", "bill(config, layout, stage=0)")), "With what do you compare them"),
    ("the last stage's bill", layouts(("bill(config, layout)", "bill(config, layout, stage=layout.pp - 1)")), "With what do you compare them"),
    ("the wrong way round", layouts((".total <= gpu_bytes", ".total > gpu_bytes")), "Which condition throws it out"),
    ("weights only", layouts(("bill(config, layout).total", "bill(config, layout).weights")), "With what do you compare them"),
    ("the first that fits", layouts(("return min(fitting, key=seconds)", "return fitting[0]")), "Another layout that fits is faster"),
    ("as much tp as possible", layouts(("min(fitting, key=seconds)", "max(fitting, key=lambda layout: layout.tp)")), "Another layout that fits is faster"),
    ("the least memory", layouts(("key=seconds", "key=lambda layout: bill(config, layout).total")), "Another layout that fits is faster"),
    ("tp up to a node, not a divisor of it", layouts((" or gpus_per_node % tp", "")), "leave no group across the border"),
    ("tp over all GPUs", layouts((" or gpus_per_node % tp", ""), ("range(1, gpus_per_node + 1)", "range(1, gpus + 1)")), "leave no group across the border"),
    ("layers are not divided evenly", layouts((" or config.num_layers % pp", "")), "Which of these four does your layout not divide"),
    ("tokens are not divided evenly", layouts((" or config.seq_length % tp", "")), "before you have asked whether it divides everything"),
    ("sequences are not divided evenly", layouts((" or sequences % dp", "")), "before you have asked whether it divides everything"),
    ("micro-batches as if there were one replica", layouts(("layout_of(dp, pp, tp, sequences)", "layout_of(dp, pp, tp, sequences * dp)")), "does `layout_of` get the number of sequences"),
    ("None where nothing fits", layouts(('raise ValueError(f"no layout of {gpus} GPUs with {gpu_bytes / 1e9:.0f} GB holds this model: take more GPUs")', "return None")), "What does your function do when none is left"),
    ("a tuple", layouts(("return min(fitting, key=seconds)", "best = min(fitting, key=seconds)\n    return best.dp, best.pp, best.tp")), "The result is one of the layouts"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("14.1", BUCKETS), ("14.2", ZERO), ("14.3", MESH), ("14.4", NORM), ("14.5", LAYOUTS))
    for name, source, says in answers
]
