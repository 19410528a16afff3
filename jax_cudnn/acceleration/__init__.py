"""From the equations of any JAX function to graphs (:func:`jax_cudnn.accelerate`)."""
