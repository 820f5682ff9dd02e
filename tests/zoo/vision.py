"""The families of timm and torchvision, each by one small model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

ROWS, CLASSES = 8, 6
Size = tuple[int, ...]  # of one input


@functools.cache
def declared() -> Any:
    """Let torchvision be imported where its C++ operators cannot be loaded: what it registers is declared.

    A build of torchvision for another device than torch's has no operators here. Only boxes need them.
    """
    if find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


# ---- torchvision


def _residual() -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _bottlenecks() -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=4)


def _dense() -> nn.Module:
    from torchvision.models import densenet

    return densenet.DenseNet(4, (2, 2), 8, num_classes=CLASSES, memory_efficient=False)


def _convnext() -> nn.Module:
    from torchvision.models import convnext

    setting = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(setting, stochastic_depth_prob=0.0, num_classes=CLASSES)


def _efficient() -> nn.Module:
    from torchvision.models import efficientnet

    setting = [
        efficientnet.FusedMBConvConfig(2, 3, 1, 8, 8, 1),
        efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2),
    ]
    return efficientnet.EfficientNet(setting, 0.0, 0.0, num_classes=CLASSES, last_channel=32)


def _swin(second: bool) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if second else {}
    sizes: Any = ([4, 4], 16, [2, 1], [2, 4], [4, 4])
    return swin.SwinTransformer(*sizes, stochastic_depth_prob=0.0, num_classes=CLASSES, **parts)


def _vit() -> nn.Module:
    from torchvision.models import vision_transformer

    return vision_transformer.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=CLASSES)


def _maxvit() -> nn.Module:
    from torchvision.models import maxvit

    return maxvit.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models import regnet

    params = regnet.BlockParams.from_init_params(4, 8, 8.0, 2.0, 4, se_ratio=0.25)
    return regnet.RegNet(params, num_classes=CLASSES, stem_width=8)


def _mobile() -> nn.Module:
    from torchvision.models import mobilenetv2

    setting = [[1, 8, 1, 1], [4, 16, 2, 2]]
    return mobilenetv2.MobileNetV2(CLASSES, 0.25, setting, dropout=0.0)


def _mobile3() -> nn.Module:
    from torchvision.models import mobilenetv3

    kind = mobilenetv3.InvertedResidualConfig
    setting = [
        kind(16, 3, 16, 16, True, "RE", 2, 1, 0.5),
        kind(16, 5, 32, 24, True, "HS", 2, 1, 0.5),
        kind(24, 5, 48, 24, True, "HS", 1, 1, 0.5),
    ]
    return mobilenetv3.MobileNetV3(setting, 32, CLASSES, dropout=0.0)


def _shuffle() -> nn.Module:
    from torchvision.models import shufflenetv2

    return shufflenetv2.ShuffleNetV2([1, 2, 1], [8, 16, 24, 32, 48], CLASSES)


def _squeeze() -> nn.Module:
    from torchvision.models import squeezenet

    return squeezenet.SqueezeNet("1_1", CLASSES, dropout=0.0)


def _mnas() -> nn.Module:
    from torchvision.models import mnasnet

    return mnasnet.MNASNet(0.25, CLASSES, dropout=0.0)


def _goog() -> nn.Module:
    from torchvision.models import GoogLeNet

    return GoogLeNet(CLASSES, aux_logits=False, init_weights=False, dropout=0.0)


def _vgg() -> nn.Module:
    from torchvision.models import vgg

    net = vgg.VGG(vgg.make_layers([8, "M", 16, "M"], batch_norm=True), CLASSES, False, 0.0)
    net.classifier = nn.Sequential(nn.Linear(16 * 49, 32), nn.ReLU(True), nn.Linear(32, CLASSES))
    return net


def _films(kind: str) -> nn.Module:
    from torchvision.models.video import resnet

    conv = {"r3d": resnet.Conv3DSimple, "mc3": resnet.Conv3DNoTemporal, "r2plus1d": resnet.Conv2Plus1D}[kind]
    return resnet.VideoResNet(resnet.BasicBlock, [conv] * 4, [1, 1, 1, 1], resnet.BasicStem, CLASSES)


def _films_swin() -> nn.Module:
    from torchvision.models.video import swin_transformer as swin

    sizes: Any = ([2, 4, 4], 16, [2, 1], [2, 4], [2, 4, 4])
    return swin.SwinTransformer3d(*sizes, stochastic_depth_prob=0.0, num_classes=CLASSES)


def _segments(kind: str) -> nn.Module:
    from torchvision.models import _utils, resnet, segmentation

    body = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    layers = {"layer2": "low", "layer4": "high"} if kind == "lraspp" else {"layer4": "out"}
    backbone = _utils.IntermediateLayerGetter(body, layers)
    if kind == "lraspp":
        return segmentation.LRASPP(backbone, 128, 512, CLASSES, inter_channels=16)
    if kind == "fcn":
        return segmentation.FCN(backbone, segmentation.fcn.FCNHead(512, CLASSES))
    head = segmentation.deeplabv3.DeepLabHead(512, CLASSES, (2, 4))
    return segmentation.DeepLabV3(backbone, head)


IMAGE, FILM = (3, 32, 32), (3, 4, 32, 32)
TORCHVISION: dict[str, tuple[Callable[[], nn.Module], Size]] = {
    "resnet": (_residual, IMAGE),
    "resnext": (_bottlenecks, IMAGE),
    "densenet": (_dense, IMAGE),
    "convnext": (_convnext, IMAGE),
    "efficientnet": (_efficient, IMAGE),
    "swin": (lambda: _swin(False), IMAGE),
    "swin_v2": (lambda: _swin(True), IMAGE),
    "vit": (_vit, IMAGE),
    "maxvit": (_maxvit, IMAGE),
    "regnet": (_regnet, IMAGE),
    "mobilenet_v2": (_mobile, IMAGE),
    "mobilenet_v3": (_mobile3, IMAGE),
    "shufflenet_v2": (_shuffle, IMAGE),
    "squeezenet": (_squeeze, IMAGE),
    "mnasnet": (_mnas, (3, 64, 64)),
    "googlenet": (_goog, (3, 64, 64)),
    "vgg": (_vgg, IMAGE),
    "r3d": (lambda: _films("r3d"), FILM),
    "mc3": (lambda: _films("mc3"), FILM),
    "r2plus1d": (lambda: _films("r2plus1d"), FILM),
    "swin3d": (_films_swin, FILM),
    "fcn": (lambda: _segments("fcn"), IMAGE),
    "deeplabv3": (lambda: _segments("deeplabv3"), IMAGE),
    "lraspp": (lambda: _segments("lraspp"), IMAGE),
}


# ---- both


def families(group: str) -> tuple[str, ...]:
    """The names of a group's models."""
    return tuple(TORCHVISION if group == "torchvision" else TIMM)


def built(group: str, name: str) -> nn.Module:
    """A model of a family."""
    if group == "torchvision":
        net = TORCHVISION[name][0]()
    else:
        import timm

        of, options, size = TIMM[name]
        options = {"num_classes": CLASSES, "drop_rate": 0.0, **options}
        try:
            net = timm.create_model(of, img_size=size, **options)
        except TypeError:  # it takes any size
            net = timm.create_model(of, **options)
    for part in net.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return net


def images(group: str, name: str, model: nn.Module, generator: torch.Generator) -> Iterator[Any]:
    """Images, or films, of a size that it takes."""
    size = TORCHVISION[name][1] if group == "torchvision" else (3, TIMM[name][2], TIMM[name][2])
    if any(isinstance(part, nn.BatchNorm2d) for part in model.modules()):
        # of two rows of one pixel a norm is all but undetermined
        yield (torch.randn(ROWS, 3, 64, 64, generator=generator, dtype=torch.float64),)
    yield (torch.randn(ROWS, *size, generator=generator, dtype=torch.float64),)


# Of each of timm's families a model, what makes it smaller, and its images' height.
TIMM: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("beit_base_patch16_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "byobnet": ("test_byobnet", {}, 32),
    "cait": ("cait_xxs24_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "coat": ("coat_lite_mini", {"embed_dims": [16, 16, 32, 32]}, 32),
    "convit": ("convit_tiny", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "convnext": ("test_convnext", {"depths": [1, 1, 1, 1], "dims": [16, 16, 32, 32]}, 32),
    "cpubone": ("cpubone_nano", {}, 32),
    "cspnet": ("cs3darknet_focus_s", {}, 32),
    "cspnext": ("cspnext_tiny", {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "davit": (
        "davit_tiny",
        {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32], "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "deit": ("deit_tiny_patch16_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "edgenext": ("edgenext_small", {"depths": [1, 1, 1, 1], "dims": [16, 16, 32, 32]}, 32),
    "efficientformer_v2": ("efficientformerv2_s0", {"depths": [1, 1, 1, 1]}, 32),
    "efficientnet": ("test_efficientnet", {}, 32),
    "efficientvim": ("efficientvim_m1", {"depths": [1, 1, 1], "embed_dim": [32, 32, 32]}, 32),
    "efficientvit_mit": ("efficientvit_b0", {}, 32),
    "efficientvit_msra": (
        "efficientvit_m0",
        {"depth": [2, 2, 2], "embed_dim": [32, 32, 32], "num_heads": [4, 4, 4]},
        32,
    ),
    "eva": ("eva02_tiny_patch14_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "fasternet": ("fasternet_t0", {"depths": [1, 1, 1, 1], "embed_dim": 32}, 32),
    "fastvit": ("fastvit_t8", {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]}, 32),
    "gemma4_vit": ("gemma4_vit_167m", {"depth": 2, "embed_dim": 32, "num_heads": 4, "head_dim": 8}, 32),
    "ghostnet": ("ghostnet_050", {}, 32),
    "hardcorenas": ("hardcorenas_b", {}, 32),
    "hgnet": ("hgnetv2_b0", {}, 32),
    "hiera": ("hiera_tiny_224", {"embed_dim": 32, "num_heads": 4}, 32),
    "hieradet_sam2": ("sam2_hiera_tiny", {"embed_dim": 32, "num_heads": 4}, 32),
    "iformer": ("iformer_t", {}, 32),
    "inception_next": ("inception_next_atto", {"depths": [1, 1, 1, 1], "dims": [16, 16, 32, 32]}, 32),
    "lcnetv2": ("lcnetv2_small", {"depths": [1, 1, 1, 1]}, 32),
    "levit": ("levit_512_s8", {"depth": [2], "embed_dim": [32], "num_heads": [4]}, 32),
    "mambaout": ("test_mambaout", {"depths": [1, 1, 1, 1], "dims": [16, 16, 32, 32]}, 32),
    "maxxvit": ("test_maxvit", {}, 32),
    "mlp_mixer": ("gmlp_ti16_224", {}, 32),
    "mobilenetv3": ("tf_mobilenetv3_small_minimal_100", {}, 32),
    "mobilevit": ("mobilevit_xxs", {}, 32),
    "nfnet": ("test_nfnet", {}, 32),
    "pit": ("pit_ti_224", {"depth": [2, 2, 2]}, 32),
    "pvt_v2": (
        "pvt_v2_b0",
        {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32], "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "qwen3_vit": ("qwen3_vit_88m", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "regnet": ("regnetx_004_tv", {}, 32),
    "repghost": ("repghostnet_050", {}, 32),
    "repvit": ("repvit_m0_9", {"depth": [2], "embed_dim": [32]}, 32),
    "res2net": ("res2net101d", {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "resnest": ("resnest101e", {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "resnet": ("test_resnet", {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "resnetv2": ("resnetv2_18", {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "rexnet": ("rexnet_100", {}, 32),
    "senet": ("legacy_seresnet18", {"layers": [1, 1, 1, 1]}, 32),
    "sequencer": ("sequencer2d_s", {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]}, 32),
    "shvit": ("shvit_s1", {"depth": [2, 2, 2]}, 32),
    "sknet": ("skresnet18", {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 32]}, 32),
    "starnet": ("starnet_s050", {"depths": [1, 1, 1, 1], "base_dim": 16}, 32),
    "swiftformer": ("swiftformer_xs", {"layers": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32]}, 32),
    "swin_transformer": (
        "swin_s3_tiny_224",
        {"depths": [1, 1, 1, 1], "embed_dim": 32, "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "swin_transformer_v2": (
        "swinv2_tiny_window8_256",
        {"depths": [1, 1, 1, 1], "embed_dim": 32, "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "swin_transformer_v2_cr": (
        "swinv2_cr_tiny_224",
        {"depths": [1, 1, 1, 1], "embed_dim": 32, "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "tiny_vit": (
        "tiny_vit_5m_224",
        {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32], "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "tnt": ("tnt_s_legacy_patch16_224", {"depth": 2}, 32),
    "twins": (
        "twins_svt_base",
        {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32], "num_heads": [4, 4, 4, 4]},
        32,
    ),
    "visformer": ("visformer_tiny", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "vision_transformer": ("test_vit", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "vision_transformer_relpos": ("test_vit_relpos", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "vision_transformer_sam": ("samvit_base_patch16", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "vitamin": ("vitamin_small_224", {"depth": 2}, 32),
    "vovnet": ("ese_vovnet19b_slim_dw", {}, 32),
    "xcit": ("xcit_nano_12_p8_224", {"depth": 2, "embed_dim": 32, "num_heads": 4}, 32),
    "densenet": ("densenet121", {"growth_rate": 4, "block_config": [2, 2, 2, 2]}, 32),
}
