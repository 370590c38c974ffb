"""The math of the lean layers: one ``autograd.Function`` per file, and its kernels. The modules above are thin."""
