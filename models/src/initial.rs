//! What tensors are before a training: by family and name, with the published code's deviations and bounds. Normal numbers are cut at two
//! deviations for every family, where the published code cuts at two units (that is, hardly ever) or not at all.

use crate::sample::Rng;

/// What a tensor's numbers are drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// All the same.
    Constant(f32),
    /// Normal numbers, drawn again beyond two deviations.
    Normal {
        /// Standard deviation before the cut.
        deviation: f32,
    },
    /// Uniform in -bound..bound.
    Uniform {
        /// The bound.
        bound: f32,
    },
    /// Sines and cosines of the places in a square grid, as DiT's `pos_embed`.
    Grid,
}

/// Standard deviation of most weights.
pub const DEVIATION: f32 = 0.02;

/// TransNeXt's temperature: softplus of it is 1 / 0.24.
const TEMPERATURE: f32 = 4.151_042;

/// The number of tensors that every training starts from a constant: norms 1, biases 0.
pub fn constant(name: &str) -> Option<f32> {
    let (module, kind) = name.rsplit_once('.').unwrap_or(("", name));
    let is_norm = module.rsplit('.').next().is_some_and(|last| last.contains("norm"));
    match kind {
        "weight" if is_norm => Some(1.0),
        "bias" => Some(0.0),
        "temperature" => Some(TEMPERATURE),
        _ => None,
    }
}

/// What the tensor `name` of a model of `family` is drawn from.
///
/// - LLaMA: weights normal, deviation 0.02.
/// - SwitchHead: the same; the rows that score experts deviation 1 / sqrt(width), so that scores are about 1.
/// - ViT: the same; convolutions normal by their fan-out; local biases deviation 0.0004, learnable biases 0.
/// - DiT: linear layers uniform by Glorot and Bengio; modulations and the last layer 0, so that blocks begin as the identity.
/// - MoA: linear layers uniform by Glorot and Bengio; experts by their own matrix; embeddings normal, deviation 1 / sqrt(width).
pub fn initial(family: &str, name: &str, shape: &[usize]) -> Initial {
    if let Some(value) = constant(name) {
        return Initial::Constant(value);
    }
    let ends = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    let normal = |deviation| Initial::Normal { deviation };
    // (inputs, outputs) of one matrix; of a kernel, with its window.
    let fans = match *shape {
        [out, input] => (input, out),
        [out, input, rows, columns] => (input * rows * columns, out * rows * columns),
        // Experts: one (in, out) matrix each.
        [_, input, out] => (input, out),
        _ => (1, 1),
    };
    let glorot = Initial::Uniform { bound: (6.0 / (fans.0 + fans.1).max(1) as f32).sqrt() };
    let width = shape.last().copied().unwrap_or(1).max(1) as f32;
    match family {
        "dit" | "moh-dit" => match () {
            () if name == "pos_embed" => Initial::Grid,
            () if name.contains("adaLN_modulation") || name.starts_with("final_layer.linear") => Initial::Constant(0.0),
            () if name.starts_with("t_embedder") || name.starts_with("y_embedder") => normal(DEVIATION),
            // One matrix, whose columns are the window's places: (out, in * rows * columns).
            () if name.starts_with("x_embedder") => {
                let (input, out) = (fans.0, shape[0]);
                Initial::Uniform { bound: (6.0 / (input + out).max(1) as f32).sqrt() }
            }
            () => glorot,
        },
        "vit" | "moh-vit" => match shape.len() {
            _ if ends(&["relative_pos_bias_local"]) => normal(0.0004),
            _ if ends(&["learnable_bias"]) => Initial::Constant(0.0),
            // A depthwise kernel has one group a channel.
            4 => normal((2.0 / if shape[1] == 1 { shape[2] * shape[3] } else { fans.1 } as f32).sqrt()),
            _ => normal(DEVIATION),
        },
        "moa" => match () {
            () if name.contains("embed_") || ends(&["output_projection.weight"]) => normal(width.powf(-0.5)),
            () if ends(&["w_gate"]) => normal(DEVIATION),
            () => glorot,
        },
        "switchhead" if ends(&["sel_v", "sel_o"]) => normal(width.powf(-0.5)),
        _ => normal(DEVIATION),
    }
}

/// The numbers of a tensor, which depend on `seed` and its name.
pub fn fill(family: &str, name: &str, shape: &[usize], seed: u64) -> Vec<f32> {
    let elements: usize = shape.iter().product();
    let mut rng = Rng::new(seed_of(seed, name));
    match initial(family, name, shape) {
        Initial::Constant(value) => vec![value; elements],
        Initial::Uniform { bound } => (0..elements).map(|_| (2.0 * rng.uniform() - 1.0) * bound).collect(),
        Initial::Normal { deviation } => (0..elements).map(|_| deviation * truncated(&mut rng)).collect(),
        Initial::Grid => grid(shape),
    }
}

/// The generator's seed for a tensor (FNV-1a of its name).
pub fn seed_of(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn truncated(rng: &mut Rng) -> f32 {
    loop {
        let value = rng.normal();
        if value.abs() <= 2.0 {
            return value;
        }
    }
}

/// (1, side^2, width): half of the channels follow the column, half the row, each half sines, then cosines.
fn grid(shape: &[usize]) -> Vec<f32> {
    let &[_, tokens, width] = shape else { return vec![0.0; shape.iter().product()] };
    let (side, quarter) = (tokens.isqrt().max(1), (width / 4).max(1));
    let value = |token: usize, channel: usize| {
        let half = channel / (2 * quarter);
        let place = if half == 0 { token % side } else { token / side } as f64;
        let i = channel % (2 * quarter);
        let angle = place / 10_000f64.powf((i % quarter) as f64 / quarter as f64);
        (if i < quarter { angle.sin() } else { angle.cos() }) as f32
    };
    (0..tokens).flat_map(|token| (0..width).map(move |channel| value(token, channel))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_and_bounds() {
        let noise = fill("llama", "model.layers.0.mlp.up_proj.weight", &[64, 64], 1);
        let deviation = (noise.iter().map(|v| v * v).sum::<f32>() / noise.len() as f32).sqrt();
        // Cut at two deviations, a normal distribution keeps 0.88 of its deviation.
        assert!((deviation / DEVIATION - 0.88).abs() < 0.03, "{deviation}");
        assert!(noise.iter().all(|v| v.abs() <= 2.0 * DEVIATION));
        assert_eq!(fill("llama", "model.norm.weight", &[3], 1), [1.0; 3]);
        assert_eq!(fill("moh-dit", "blocks.0.adaLN_modulation.1.weight", &[6, 1], 1), [0.0; 6]);
        let bound = (6f32 / 40.0).sqrt();
        assert!(fill("moh-dit", "blocks.0.mlp.fc1.weight", &[30, 10], 1).iter().all(|v| v.abs() <= bound));
        let softplus = TEMPERATURE + (-TEMPERATURE).exp().ln_1p();
        assert!((softplus - 1.0 / 0.24).abs() < 1e-5, "{softplus}");
    }

    #[test]
    fn places_in_a_grid() {
        let table = fill("moh-dit", "pos_embed", &[1, 4, 8], 0);
        let (sin, cos) = (1f32.sin(), 1f32.cos());
        // Token 1 is in column 1 of row 0, token 2 in column 0 of row 1.
        assert_eq!([table[8], table[10], table[12], table[14]], [sin, cos, 0.0, 1.0]);
        assert_eq!([table[16], table[18], table[20], table[22]], [0.0, 1.0, sin, cos]);
    }
}
