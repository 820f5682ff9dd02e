"""The families of timm and torchvision."""


def families(group):
    return ()
