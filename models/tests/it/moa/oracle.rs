//! MoA in f64, token by token, from the tensors and the configuration alone: the formulas of the paper and of the published
//! code, written without the vocabulary that the family is written in.

use moh_models::Checkpoint;
use serde_json::Value;
use std::collections::BTreeMap;

pub(crate) type Rows = Vec<Vec<f64>>;

pub(crate) struct Oracle {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    config: Value,
}

/// A matrix that is used as x W.
struct Matrix<'a> {
    columns: usize,
    values: &'a [f64],
}

impl Matrix<'_> {
    fn after(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len() * self.columns, self.values.len());
        let column = |j: usize| x.iter().enumerate().map(|(i, x)| x * self.values[i * self.columns + j]).sum();
        (0..self.columns).map(column).collect()
    }
}

/// Which experts a token uses: what is left out has weight 0.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Gates(pub(crate) Vec<f64>);

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = x.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|e| e / sum).collect()
}

/// The error function by its series, which converges everywhere; beyond 4 it is 1 to eight digits.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..150 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

impl Oracle {
    pub(crate) fn new(checkpoint: &Checkpoint, config: &Value) -> Oracle {
        let tensors = checkpoint.names().map(|name| {
            let weight = checkpoint.get(name).unwrap();
            (name.to_owned(), (weight.shape().to_vec(), weight.to_f32().unwrap().into_iter().map(f64::from).collect()))
        });
        Oracle { tensors: tensors.collect(), config: config.clone() }
    }

    fn tensor(&self, name: &str) -> &(Vec<usize>, Vec<f64>) {
        self.tensors.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn flag(&self, key: &str) -> bool {
        self.config[key].as_bool().unwrap_or(false)
    }

    /// One expert's matrix of a stack of them.
    fn expert(&self, name: &str, e: usize) -> Matrix<'_> {
        let (shape, values) = self.tensor(name);
        let size = shape[1] * shape[2];
        Matrix { columns: shape[2], values: &values[e * size..(e + 1) * size] }
    }

    /// nn.Linear: x W^T + b.
    pub(crate) fn linear(&self, path: &str, x: &[f64]) -> Vec<f64> {
        let mut y = self.product(&format!("{path}.weight"), x);
        if let Some((_, bias)) = self.tensors.get(&format!("{path}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    /// x W^T.
    pub(crate) fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (shape, values) = self.tensor(name);
        assert_eq!(shape[1], x.len(), "{name}");
        values.chunks(shape[1]).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }

    pub(crate) fn norm(&self, path: &str, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let (weight, bias) = (&self.tensor(&format!("{path}.weight")).1, &self.tensor(&format!("{path}.bias")).1);
        let one = |(i, x): (usize, &f64)| (x - mean) / (variance + 1e-5).sqrt() * weight[i] + bias[i];
        x.iter().enumerate().map(one).collect()
    }

    pub(crate) fn activate(&self, x: f64) -> f64 {
        match self.config["activation_fn"].as_str() {
            Some("gelu") => x * 0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            _ => x.max(0.0),
        }
    }

    /// The `k` largest probabilities of one token.
    fn gates(&self, gate: &str, k: usize, x: &[f64], padding: bool) -> Gates {
        let (shape, values) = self.tensor(gate);
        let p = softmax(&Matrix { columns: shape[1], values }.after(x));
        if padding {
            return Gates(vec![0.0; p.len()]);
        }
        let mut order: Vec<usize> = (0..p.len()).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
        if k < p.len() {
            let gap = (p[order[k - 1]] - p[order[k]]) / p[order[k - 1]];
            assert!(gap == 0.0 || gap > 1e-4, "{gate}: float32 cannot decide between experts {gap} apart");
        }
        let kept = &order[..k.min(p.len())];
        let sum: f64 = if self.flag("renormalize_gates") { kept.iter().map(|&e| p[e]).sum() } else { 1.0 };
        let gate = |e: usize| if kept.contains(&e) { p[e] / sum } else { 0.0 };
        Gates((0..p.len()).map(gate).collect())
    }

    /// Attention of tokens to a source; `visible(i, j)` says whether token i sees source token j.
    fn attention(
        &self,
        path: &str,
        x: &[Vec<f64>],
        padding: &[bool],
        source: &[Vec<f64>],
        visible: impl Fn(usize, usize) -> bool,
    ) -> Rows {
        let keys: Rows = source.iter().map(|s| self.linear(&format!("{path}.k_proj"), s)).collect();
        let values: Rows = source.iter().map(|s| self.linear(&format!("{path}.v_proj"), s)).collect();
        let k = self.config["attention_heads"].as_u64().unwrap() as usize;
        let one = |i: usize| {
            let mut out = vec![0.0; x[i].len()];
            let gates = self.gates(&format!("{path}.q_proj.w_gate"), k, &x[i], padding[i]);
            for (e, gate) in gates.0.into_iter().enumerate().filter(|(_, gate)| *gate != 0.0) {
                let q = self.expert(&format!("{path}.q_proj.experts.w"), e).after(&x[i]);
                let scale = (q.len() as f64).sqrt();
                let seen: Vec<usize> = (0..source.len()).filter(|&j| visible(i, j)).collect();
                let score = |j: &usize| q.iter().zip(&keys[*j]).map(|(q, k)| q * k).sum::<f64>() / scale;
                let weights = softmax(&seen.iter().map(score).collect::<Vec<_>>());
                let mut mean = vec![0.0; q.len()];
                for (j, weight) in seen.iter().zip(weights) {
                    mean.iter_mut().zip(&values[*j]).for_each(|(m, v)| *m += weight * v);
                }
                let y = self.expert(&format!("{path}.q_proj.output_experts.w"), e).after(&mean);
                out.iter_mut().zip(y).for_each(|(out, y)| *out += gate * y);
            }
            out
        };
        (0..x.len()).map(one).collect()
    }

    fn feed_forward(&self, path: &str, x: &[f64]) -> Vec<f64> {
        if self.config["ffd_type"] != "moe" {
            let h: Vec<f64> = self.linear(&format!("{path}.fc1"), x).into_iter().map(|h| self.activate(h)).collect();
            return self.linear(&format!("{path}.fc2"), &h);
        }
        let mut out = vec![0.0; x.len()];
        let gates = self.gates(&format!("{path}.ffd.w_gate"), 4, x, false);
        for (e, gate) in gates.0.into_iter().enumerate().filter(|(_, gate)| *gate != 0.0) {
            let h = self.expert(&format!("{path}.ffd.experts.w"), e).after(x);
            let h: Vec<f64> = h.into_iter().map(|h| self.activate(h)).collect();
            let y = self.expert(&format!("{path}.ffd.output_experts.w"), e).after(&h);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += gate * y);
        }
        out
    }

    /// x + f(norm(x)) or norm(x + f(x)).
    fn residual(&self, norm: &str, x: &[Vec<f64>], f: impl FnOnce(&[Vec<f64>]) -> Rows) -> Rows {
        let before = self.flag("normalize_before");
        let normed: Rows = x.iter().map(|x| if before { self.norm(norm, x) } else { x.clone() }).collect();
        let sum = f(&normed).into_iter().zip(x).map(|(y, x)| y.iter().zip(x).map(|(y, x)| y + x).collect::<Vec<_>>());
        sum.map(|x| if before { x } else { self.norm(norm, &x) }).collect()
    }

    fn layers(&self, root: &str, x: Rows, layer: impl Fn(&str, Rows) -> Rows) -> Rows {
        let layers = self.config["layers"].as_u64().unwrap();
        let x = (0..layers).fold(x, |x, i| {
            let path = format!("{root}.layers.{i}");
            let x = layer(&path, x);
            let ffd = |x: &[Vec<f64>]| x.iter().map(|x| self.feed_forward(&path, x)).collect();
            self.residual(&format!("{path}.final_layer_norm"), &x, ffd)
        });
        match self.flag("normalize_before") {
            true => x.iter().map(|x| self.norm(&format!("{root}.layer_norm"), x)).collect(),
            false => x,
        }
    }

    /// The layers of an encoder on one sentence.
    pub(crate) fn encoder(&self, root: &str, x: Rows, padding: &[bool]) -> Rows {
        self.layers(root, x, |path, x| {
            let attend =
                |x: &[Vec<f64>]| self.attention(&format!("{path}.self_attn"), x, padding, x, |_, j| !padding[j]);
            self.residual(&format!("{path}.self_attn_layer_norm"), &x, attend)
        })
    }

    /// The layers of a decoder on one whole target.
    pub(crate) fn decoder(&self, x: Rows, padding: &[bool], source: &[Vec<f64>], source_padding: &[bool]) -> Rows {
        self.layers("decoder", x, |path, x| {
            let own = |x: &[Vec<f64>]| {
                self.attention(&format!("{path}.self_attn"), x, padding, x, |i, j| j <= i && !padding[j])
            };
            let x = self.residual(&format!("{path}.self_attn_layer_norm"), &x, own);
            let cross = |x: &[Vec<f64>]| {
                let path = format!("{path}.encoder_attn");
                self.attention(&path, x, padding, source, |_, j| !source_padding[j])
            };
            self.residual(&format!("{path}.encoder_attn_layer_norm"), &x, cross)
        })
    }

    /// Vectors of tokens: sqrt(width) times the embedding (in a sentence encoder, the embedding), plus the position's vector, which counts the tokens that are no
    /// padding from the padding's number on.
    pub(crate) fn embed(&self, root: &str, ids: &[i64]) -> Rows {
        let (shape, table) = self.tensor(&format!("{root}.embed_tokens.weight"));
        let (width, pad) = (shape[1], self.config["padding_idx"].as_i64().unwrap_or(1));
        // fairseq's TransformerSentenceEncoder does not scale.
        let is_plain = self.flag("no_scale_embedding") || root == "encoder.sentence_encoder";
        let scale = if is_plain { 1.0 } else { (width as f64).sqrt() };
        let mut position = pad as usize;
        let one = |&id: &i64| {
            let x = &table[id as usize * width..(id as usize + 1) * width];
            position += usize::from(id != pad);
            let vector = self.position(root, width, if id == pad { pad as usize } else { position });
            let x: Vec<f64> = x.iter().zip(vector).map(|(x, p)| scale * x + p).collect();
            match self.flag("layernorm_embedding") {
                true => self.norm(&format!("{root}.layernorm_embedding"), &x),
                false => x,
            }
        };
        ids.iter().map(one).collect()
    }

    fn position(&self, root: &str, width: usize, position: usize) -> Vec<f64> {
        let pad = self.config["padding_idx"].as_u64().unwrap_or(1) as usize;
        if self.flag("no_token_positional_embeddings") {
            return vec![0.0; width];
        }
        if self.flag("learned_pos") {
            let (_, table) = self.tensor(&format!("{root}.embed_positions.weight"));
            return table[position * width..(position + 1) * width].to_vec();
        }
        if position == pad {
            return vec![0.0; width];
        }
        let half = width / 2;
        let angle = |i: usize| position as f64 * 10_000f64.powf(-(i as f64) / (half as f64 - 1.0));
        (0..half).map(|i| angle(i).sin()).chain((0..half).map(|i| angle(i).cos())).collect()
    }
}
