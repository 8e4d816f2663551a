"""What devices compute: kernels by kind of device."""
