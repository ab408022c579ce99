# %% [markdown]
# # Tensor parallelism, built by hand
#
# Welcome. In this course you write Megatron-style tensor parallelism yourself, one piece at a time: how a weight matrix is cut over several
# devices, what they must send each other, forward and backward, and why. Your code runs on real processes, on this machine, with or without
# GPUs, and each exercise is checked there.
#
# **How far are you?** Click into the next cell and press Shift+Enter. Below it appears what you have done and where to go on; run it again
# whenever you come back.

# %%
from tplab.course import progress

progress()

# %% [markdown]
# ## The chapters
#
# Each takes 60 to 105 minutes with its exercises, and all of them together about 22 hours. Go from top to bottom. If you get stuck, you can still
# go on: whatever a chapter builds is there, ready-made, for the next one.
#
# | | chapter | you build | exercises, and time for the chapter |
# |---|---|---|---|
# | 00 | [Why parallel](00_why_parallel.ipynb) | the memory bill: weights, activations, gradients, optimizer state | 3, about 75 min |
# | 01 | [Ranks and collectives](01_ranks_and_collectives.ipynb) | ring all-reduce from send and receive | 5, about 90 min |
# | 02 | [Splitting matrices](02_splitting_matrices.ipynb) | the two ways to cut a product: by columns, by rows | 4, about 60 min |
# | 03 | [Conjugate operators](03_conjugate_operators.ipynb) | f, g, scatter and gather as autograd functions | 4, about 75 min |
# | 04 | [Parallel linear layers](04_parallel_linear.ipynb) | ColumnParallelLinear, RowParallelLinear | 5, about 90 min |
# | 05 | [Parallel MLP](05_parallel_mlp.ipynb) | ParallelMLP, SwiGLU, and a training run on real text | 4, about 75 min |
# | 06 | [Parallel attention](06_parallel_attention.ipynb) | heads over ranks, fused QKV, grouped-query heads, KV cache | 5, about 90 min |
# | 07 | [Vocabulary-parallel embedding](07_vocab_parallel_embedding.ipynb) | VocabParallelEmbedding, tied output layer | 5, about 90 min |
# | 08 | [Vocabulary-parallel loss](08_vocab_parallel_loss.ipynb) | softmax and loss over a vocabulary that no rank holds whole | 5, about 90 min |
# | 09 | [Randomness](09_randomness.ipynb) | the same model for any number of ranks: init and dropout | 5, about 90 min |
# | 10 | [Parallel transformer](10_parallel_transformer.ipynb) | a transformer layer, a GPT, generation | 4, about 90 min |
# | 11 | [Communication cost](11_communication_cost.ipynb) | the cost model, and overlap with the backward pass | 4, about 75 min |
# | 12 | [Sequence parallel](12_sequence_parallel.ipynb) | all-reduce as reduce-scatter and all-gather; activation memory | 4, about 75 min |
# | 13 | [Pipeline parallel](13_pipeline_parallel.ipynb) | GPipe, 1F1B, interleaved; the bubble | 4, about 90 min |
# | 14 | [Data parallel and 3D](14_data_parallel_and_3d.ipynb) | data parallelism, ZeRO 1 to 3, the 3D mesh | 5, about 90 min |
# | 15 | [Capstone](15_capstone.ipynb) | train a tensor-parallel GPT on this machine and report | 5, about 105 min |
#
# ## How a chapter works
#
# Read and run the cells from top to bottom, with Shift+Enter. Three kinds of cells ask something of you:
#
# - **Predict**: replace the dots by what you expect, then run the cell. The cells after it show what happens.
# - **Exercise**: a function or a class with `# your code here`. Write your answer in place of the line that raises `NotImplementedError`, and run
#   the cell.
# - **Check**, right below: run it. It starts 1, 2 and 4 processes, feeds your code fresh random numbers, and compares with plain PyTorch on one
#   process. A failed check says what differs and on which process, and asks you a question.
#
# Above each check you can read what it compares. Until your answer is written, the check only says that it is waiting for you, so you can run a
# whole chapter at any time.
#
# ## In a terminal
#
# Open one with File, New, Terminal. Save your notebook first: these commands see what is saved.
#
# | | |
# |---|---|
# | `tplab check 4` | check every exercise of chapter 4; `tplab check --exercise 4.2` checks one, `tplab check all` everything |
# | `tplab progress` | how far you are, as the first cell of this page shows it |
# | `tplab plan --params 70e9 --gpus 64 --gpu h100` | how to lay a model out over a cluster: what fits, its memory, its predicted time (chapter 11) |
# | `python -m tplab.capstone --layers mine` | train a GPT that is made of your answers (chapter 15) |
#
# ## When you are stuck
#
# | | |
# |---|---|
# | `tplab hint 4.2` | the next of three hints, which are also folded away below each exercise; without a number, for the exercise that comes next |
# | `tplab solution 4.2` | the answer and how to get there; your notebook stays as it is |
# | `tplab reset --exercise 4.2` | begin an exercise anew; `tplab reset 4` begins the chapter anew. Your notebook is kept in `kept/` |
# | `tplab update` | bring new versions of the chapters into your notebooks; what you wrote stays |
# | `tplab mine` | your own library: the answers that passed, as a Python package |
# | `tplab doctor` | when something does not run: what is wrong with this machine, and the command that mends it |
#
# A cell that does not come back can be stopped with the square in the toolbar. Programs that wait for ever are part of the subject: a run in
# which processes wait for each other ends by itself, with the line that each of them waits in.
