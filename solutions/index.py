# %% [markdown]
# # Tensor parallelism, built by hand
#
# Welcome! In this course, you'll write Megatron-style tensor parallelism yourself, one piece at a time. You'll decide which rank holds which slice of a weight matrix. You'll work out what the ranks have to send each other in the forward and the backward pass, and you'll find out why they can't send any less. Your code runs on real processes on this machine, with or without GPUs, and every exercise has a check.
#
# In this picture, the striped blocks are the ones that you'll split, and every arrow is a message that you'll send:
#
# ![A GPT on 1, 2 and 4 ranks. The embedding, the attention, the MLP, the logits and the loss are split into one stripe per rank, and everything else is the same on every rank. Next to each block stands the size of the messages that it causes](pictures/poster.svg)
#
# **Where are you?** Click the cell below and press Shift+Enter. The cell shows what you've done so far and takes you to the next exercise. You can run the cell again whenever you come back.

# %%
from tplab.course import progress

progress()

# %% [markdown]
# ## The chapters
#
# Start with **[a first taste](00_start.ipynb)**, which takes fifteen minutes. After that, each chapter takes 60 to 90 minutes including its exercises. All the chapters together take about 20 hours, and the optional sections of chapters 01, 04, 06, 10, and 13 add about one more hour. The chapters build on each other, so it's best to work through them in order. But if you get stuck, you can still move on, because every chapter comes with ready-made versions of everything that the earlier chapters build.
#
# | | chapter | you build | exercises, and time for the chapter |
# |---|---|---|---|
# | start | [A first taste](00_start.ipynb) | a matmul on two processes, split both ways | 2, about 15 min |
# | 00 | [Why parallel](00_why_parallel.ipynb) | the memory bill of a GPT: weights, gradients, optimizer state and activations | 4, about 75 min |
# | 01 | [Ranks and collectives](01_ranks_and_collectives.ipynb) | a ring all-reduce, made of sends and receives | 5, about 75 min |
# | 02 | [Splitting matrices](02_splitting_matrices.ipynb) | shards, and the cheapest way through two matmuls | 4, about 60 min |
# | 03 | [Conjugate operators](03_conjugate_operators.ipynb) | f, g, scatter and gather as autograd functions | 4, about 75 min |
# | 04 | [Parallel linear layers](04_parallel_linear.ipynb) | ColumnParallelLinear and RowParallelLinear | 5, about 75 min |
# | 05 | [The parallel MLP](05_parallel_mlp.ipynb) | ParallelMLP and SwiGLU, and a training run on real text | 4, about 75 min |
# | 06 | [Parallel attention](06_parallel_attention.ipynb) | attention with sharded heads, masks, cross-attention and shared keys, and a block that trains | 6, about 75 min |
# | 07 | [The vocabulary-parallel embedding](07_vocab_parallel_embedding.ipynb) | VocabParallelEmbedding and a tied output layer | 4, about 75 min |
# | 08 | [The vocabulary-parallel loss](08_vocab_parallel_loss.ipynb) | softmax and cross-entropy when no rank has all the logits, and a label smoothing that shipped broken | 4, about 75 min |
# | 09 | [Randomness](09_randomness.ipynb) | random numbers that agree where they must, and a block that trains with dropout and recomputation | 5, about 75 min |
# | 10 | [The parallel transformer](10_parallel_transformer.ipynb) | encoder and decoder layers, a GPT that trains, and text generation | 6, about 75 min |
# | 11 | [What communication costs](11_communication_cost.ipynb) | a layer that sends while it multiplies, the time of a layer on GPUs that you don't have, and a mean that was divided too early | 5, about 75 min |
# | 12 | [Sequence parallel](12_sequence_parallel.ipynb) | sequence parallelism, which shards the activations between the layers | 4, about 75 min |
# | 13 | [Pipeline parallelism](13_pipeline_parallel.ipynb) | a schedule that beats GPipe, and a model that trains in stages | 5, about 90 min |
# | 14 | [Data parallelism and the 3D mesh](14_data_parallel_and_3d.ipynb) | replicas that learn as one, ZeRO, and which rank of a 3D mesh sits where | 4, about 90 min |
# | 15 | [Capstone: train a GPT](15_capstone.ipynb) | a training run of your own code that survives a pulled plug bit for bit, and layouts for larger ones | 4, about 75 min |
#
# ## How a chapter works
#
# Read the chapter from top to bottom, and run its cells with Shift+Enter as you go. There are three kinds of cells where you have something to do:
#
# - **Predict**: Replace the dots with what you expect, and then run the cell. The cells below show what really happens.
#
# - **Exercise**: You'll see a function or a class with `# your code here`. Replace the line that raises `NotImplementedError` with your answer, and run the cell.
#
# - **Check**: Run this cell once you've written your answer. The check starts 1, 2, and 4 processes, gives your code fresh random inputs, and compares the results with plain PyTorch in a single process. If something is wrong, the check tells you what differs and on which rank. The check also asks you a question that points to the cause.
#
# The text above each check says what the check compares. If you haven't written an exercise yet, its check only says that it's waiting for you, so you can run an entire chapter at any time.
#
# ## In a terminal
#
# To open a terminal, choose File, New, Terminal. Save your notebook first, because these commands read the saved file.
#
# | | |
# |---|---|
# | `tplab check 4` | checks every exercise of chapter 4; `tplab check --exercise 4.2` checks a single exercise, and `tplab check all` checks everything |
# | `tplab progress` | shows your progress, like the first cell of this page |
# | `tplab plan --params 70e9 --gpus 64 --gpu h100` | finds a layout of a model for a cluster, with its memory and its predicted time (chapter 11) |
# | `python -m tplab.capstone --layers mine` | trains a GPT that's made of your answers (chapter 15) |
#
# ## When you're stuck
#
# | | |
# |---|---|
# | `tplab hint 4.2` | shows the next of three hints, which you can also unfold below each exercise; without a number, the command takes the next exercise |
# | `tplab solution 4.2` | shows and explains the answer, and doesn't change your notebook |
# | `tplab reset --exercise 4.2` | starts an exercise over; `tplab reset 4` starts the whole chapter over. A copy of your notebook stays in `kept/` |
# | `tplab update` | brings new versions of the chapters into your notebooks and keeps what you wrote |
# | `tplab mine` | shows your own library, a Python package with the answers that passed |
# | `tplab doctor` | finds out why something doesn't run on this machine, and names the command that fixes it |
#
# If a cell never finishes, stop it with the square button in the toolbar. In a course about distributed programs, that's bound to happen. But when your ranks are waiting for each other, the run ends by itself and shows you the line that each rank is stuck in.
