"""The functional surface on which networks are written; TensorRT's layer mechanics stay behind it."""
