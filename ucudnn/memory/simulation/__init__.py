"""What a plan does on a device: peak, time, stalls and bytes moved, without running anything."""
