"""``deepspeed.inference.config``."""

from espalier.compat.absent import or_absent

__all__: list[str] = []

__getattr__ = or_absent(
    __name__,
    "deepspeed.inference.config",
    {
        "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig "
        "InferenceCheckpointConfig ActivationQuantConfig BaseQuantConfig DtypeEnum MoETypeEnum "
        "QKVQuantConfig "
        "QuantTypeEnum WeightQuantConfig": "deepspeed.init_inference(model, config={...}) takes a dict"
    },
)
