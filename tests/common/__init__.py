"""A file of Git LFS as it is in a checkout without LFS."""

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 269060552\n"
