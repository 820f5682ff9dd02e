"""The data axis: gradients reduced in flat buffers while the backward pass goes on."""
