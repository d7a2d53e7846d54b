"""CPU kernels in C++: how they are built, loaded and called. They compute a decoder stack in one call."""
