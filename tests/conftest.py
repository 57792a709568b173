"""One thread for every test: the tensors are small, and two threads on shared cores mostly wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
