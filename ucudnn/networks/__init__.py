"""Networks: the layers of AlexNet, ResNet, Inception and others, and what types and layouts make of them."""
