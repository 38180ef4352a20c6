//! Learned shared heads: a search chooses which heads of a layer are always on. Published models share the first ones.
//!
//! The search's model has no shared heads: in every layer that routes, a token uses A of H heads. Beside the model's tensors there is a
//! score s for each of these heads ([`parameters`]). A forward of the search ([`crate::eager::Eager::search_shared_heads`]) shares the heads
//! with `SLOPE * s + noise > 0`, the A - 1 largest at most, and routes k = A - |shared| of the others. Gates are those of the model that
//! these sets make, with equal weights of its two parts.
//!
//! Masks are binary, so the scores' gradient is straight-through (arXiv 1308.3432), with the slope of `sigmoid(SLOPE * s + noise)`
//! (arXiv 1611.01144): the first-order estimate of what sharing a head changes. At tokens where its logit is below that of the weakest
//! selected routed head, sharing adds the head and takes that head's place. Elsewhere it changes nothing. A head that is not shared in a
//! step gets a gradient of 0; noise makes every head shared now and then.
//!
//! [`chosen`] ends the search: an ordinary model with these sets, which is trained further and exported.

use crate::algebra::sigmoid;
use crate::checkpoint::Config;
use crate::error::{Error, Result};
use crate::families::{Layer, Model};
use crate::heads::{HeadCounts, HeadSet, Parts};
use crate::operators::{Computed, ModelOperator};
use crate::parameters::Parameters;
use crate::router;
use crate::sample::Rng;
use candle_core::{D, DType, Device, Tensor, Var};
use moh_operators::top_k_router::{Inputs, Kind, TopKRouter};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// What the names of scores begin with; the path of the layer's module follows.
pub const SCORES: &str = "shared_scores.";

/// The factor of scores, whose noise has scale 1. AdamW moves a score by about the learning rate a step, so a rate of 0.01 changes the
/// log-odds of being shared by up to 0.1.
pub const SLOPE: f64 = 10.0;

/// Families with a two-stage router or query norms.
const FAMILIES: [&str; 4] = ["moh-dit", "moh-vit", "moh-llm", "moh-llama"];

/// Keys that `shared_heads` and `top_k` replace.
const REPLACED: [&str; 4] = ["shared_head", "routed_head", "moh_shared_fraction", "moh_routed_fraction"];

/// What a search ends with: a model with any heads shared, ready to be trained further.
pub struct Chosen {
    /// The configuration: the search's with `shared_heads` (a list of heads a layer) and `top_k` (a number a layer).
    pub config: Map<String, Value>,
    /// The model that it describes.
    pub model: Model,
    /// The model's tensors, copied: variables of the search stay as they are.
    pub parameters: Parameters,
}

/// The variables of a search: those of `model` in `start`, which are shared, not copied, and scores of 0, (num_heads) float32 for each
/// layer that is searched. Layers whose heads are all on, or that route to one head, are not.
///
/// # Errors
/// [`Error::Sharing`] for a model with shared heads in a layer that routes, of a family with another router, or without a layer to search;
/// [`Error::Variable`] where `start` lacks a tensor.
pub fn parameters(model: &Model, start: &Parameters) -> Result<Parameters> {
    let mut vars: BTreeMap<String, Var> = start.iter().map(|(name, var)| (name.to_owned(), var.clone())).collect();
    for layer in layers(model)?.iter().filter(|layer| is_searched(layer.heads)) {
        vars.insert(name(&layer.path), Var::zeros(layer.heads.num_heads, DType::F32, start.device())?);
    }
    Parameters::new(vars, &[model], start.device())
}

/// The heads of every layer that the scores choose now, without noise.
///
/// # Errors
/// As [`parameters`], and [`Error::Variable`] for a score that is missing or of another shape.
pub fn sets(model: &Model, parameters: &Parameters) -> Result<Vec<HeadSet>> {
    let set = |layer: Layer| {
        if !is_searched(layer.heads) {
            return Ok(HeadSet::first(layer.heads));
        }
        let HeadCounts { num_heads, top_k, .. } = layer.heads;
        split(&(scores(parameters, &layer.path, num_heads)?.as_tensor() * SLOPE)?, top_k)
    };
    layers(model)?.into_iter().map(set).collect()
}

/// The model that the scores choose now, without noise: it computes what the search's noise-free forward does. A two-stage router's
/// `wg` keeps the rows of the routed heads, `wg_1` takes those of the shared ones, and `wg_0`, the balance of the two parts, begins at 0.
///
/// # Errors
/// As [`sets`]; what the configuration is refused for.
pub fn chosen(config: &Config, model: &Model, parameters: &Parameters) -> Result<Chosen> {
    let sets = sets(model, parameters)?;
    let device = parameters.device();
    let mut vars = BTreeMap::new();
    for (name, var) in parameters.iter().filter(|(name, _)| !name.starts_with(SCORES)) {
        vars.insert(name.to_owned(), Var::from_tensor(&var.as_detached_tensor().copy()?)?);
    }
    for (layer, set) in model.layers().iter().zip(&sets) {
        let path = |name: &str| format!("{}.{name}.weight", layer.path);
        // Query norms have no weights.
        let router = vars.get(&path("wg")).filter(|_| is_searched(layer.heads) && !set.shared().is_empty()).cloned();
        let Some(router) = router else { continue };
        let rows =
            |heads: &[usize]| Var::from_tensor(&router.as_detached_tensor().index_select(&indices(heads, device)?, 0)?);
        let parts = Parts::of(set.counts());
        vars.insert(path("wg"), rows(&set.routed())?);
        vars.insert(path("wg_0"), Var::zeros((parts.balance, router.dim(1)?), DType::F32, device)?);
        if parts.shared > 0 {
            vars.insert(path("wg_1"), rows(set.shared())?);
        }
    }
    let mut values = config.values().clone();
    REPLACED.iter().for_each(|key| drop(values.remove(*key)));
    values.insert("shared_heads".to_owned(), json!(sets.iter().map(HeadSet::shared).collect::<Vec<_>>()));
    values.insert("top_k".to_owned(), json!(sets.iter().map(|set| set.counts().top_k).collect::<Vec<_>>()));
    let (model, _) = Model::plan(&Config::new(config.path(), values.clone()), Some(model.family()))?;
    let parameters = Parameters::new(vars, &[&model], device)?;
    Ok(Chosen { config: values, model, parameters })
}

/// The name of the scores of the layer at `path`.
pub(crate) fn name(path: &str) -> String {
    format!("{SCORES}{path}")
}

/// The layers of a model that can be searched.
fn layers(model: &Model) -> Result<Vec<Layer>> {
    let refused = |subject: String, expected: &str, found: String| {
        Err(Error::Sharing { subject, expected: expected.to_owned(), found })
    };
    if !FAMILIES.contains(&model.family()) {
        return refused("the family".to_owned(), &format!("one of {}", FAMILIES.join(", ")), model.family().to_owned());
    }
    let layers = model.layers();
    for Layer { path, heads, .. } in &layers {
        if heads.num_shared_heads > 0 && heads.num_shared_heads < heads.num_heads {
            let found = format!("{} of {} heads shared", heads.num_shared_heads, heads.num_heads);
            return refused(path.clone(), "no shared heads before a search", found);
        }
    }
    match layers.iter().any(|layer| is_searched(layer.heads)) {
        true => Ok(layers),
        false => refused(
            "the layers".to_owned(),
            "one with at least 2 active heads, and fewer than all",
            layers
                .iter()
                .map(|layer| format!("{} of {}", layer.heads.active(), layer.heads.num_heads))
                .collect::<Vec<_>>()
                .join(", "),
        ),
    }
}

/// Whether there is something to choose: one head at least stays routed.
fn is_searched(heads: HeadCounts) -> bool {
    heads.num_shared_heads == 0 && (2..heads.num_heads).contains(&heads.top_k)
}

/// The scores of the layer at `path`.
pub(crate) fn scores<'a>(parameters: &'a Parameters, path: &str, num_heads: usize) -> Result<&'a Var> {
    let tensor = name(path);
    let found = match parameters.get(&tensor) {
        Some(var) if var.dims() == [num_heads] => return Ok(var),
        Some(var) => format!("one of shape {:?} for {num_heads} heads", var.dims()),
        None => "none of this name".to_owned(),
    };
    Err(Error::Variable { tensor, found })
}

/// The heads for `x`, (num_heads): positive ones are shared, and as many others routed that `active` are on.
fn split(x: &Tensor, active: usize) -> Result<HeadSet> {
    let x = x.to_vec1::<f32>()?;
    let mut shared: Vec<usize> = (0..x.len()).filter(|&head| x[head] > 0.0).collect();
    shared.sort_by(|&a, &b| x[b].total_cmp(&x[a]));
    shared.truncate(active.saturating_sub(1));
    shared.sort_unstable();
    let top_k = active - shared.len();
    Ok(HeadSet::new(x.len(), shared, top_k))
}

/// Gates and choice among the routed heads, for the `logits` (batch, q_len, num_heads) of all heads, their `scores` (num_heads), and `active`
/// heads a token; `seed` is that of the noise.
pub(crate) fn route(
    kind: Kind,
    logits: &Tensor,
    scores: &Tensor,
    active: usize,
    seed: Option<u64>,
) -> Result<Computed> {
    let mut x = (scores * SLOPE)?;
    if let Some(seed) = seed {
        x = (x + noise(seed, scores.elem_count(), scores.device())?)?;
    }
    let set = split(&x, active)?;
    let given = match kind {
        Kind::TwoStage => of_two_stages(logits, &set)?,
        Kind::QueryNorms => of_norms(logits)?,
        Kind::Probabilities | Kind::Renormalized => return Err(Error::Internal("shared experts")),
    };
    let computed = TopKRouter::compute(&router::attributes(kind, &set), &Inputs { scores: &given })?;
    Ok(Computed { output: straight_through(&computed.output, logits, &x, &set)?, ..computed })
}

/// Logistic noise of scale 1 for every head.
fn noise(seed: u64, heads: usize, device: &Device) -> Result<Tensor> {
    let mut rng = Rng::new(seed);
    // In the middle of the generator's steps: neither 0 nor 1.
    let half_step = 0.5 / f64::from(1 << 24);
    let logistic = |u: f64| (u / (1.0 - u)).ln() as f32;
    let numbers: Vec<f32> = (0..heads).map(|_| logistic(f64::from(rng.uniform()) + half_step)).collect();
    Ok(Tensor::new(numbers, device)?)
}

/// What the resulting model's router gives for the same input: the routed heads' logits, the balance 0 and the shared heads' logits.
fn of_two_stages(logits: &Tensor, set: &HeadSet) -> Result<Tensor> {
    let (batch, tokens, _) = logits.dims3()?;
    let columns = |heads: &[usize]| Ok::<_, Error>(logits.index_select(&indices(heads, logits.device())?, 2)?);
    let widths = Parts::of(set.counts());
    let mut parts = vec![columns(&set.routed())?];
    if widths.balance > 0 {
        parts.push(Tensor::zeros((batch, tokens, widths.balance), DType::F32, logits.device())?);
    }
    if widths.shared > 0 {
        parts.push(columns(set.shared())?);
    }
    Ok(Tensor::cat(&parts, D::Minus1)?)
}

/// Queries of one channel a head, whose norms are the true ones up to a token's shift and positive factor. These change neither the order nor
/// the logits, from which mean and deviation are taken.
fn of_norms(logits: &Tensor) -> Result<Tensor> {
    Ok((logits.broadcast_sub(&logits.detach().min_keepdim(D::Minus1)?)? + 1.0)?)
}

/// The same gates, with the scores' gradient.
///
/// With d_i = soft_i - detach(soft_i), numerically 0, and `off_i(t)` = 1 where token t would not have been routed to the shared head i:
/// gate_i(t) += d_i off_i(t) gate_i(t), and of the weakest selected routed head gate(t) -= gate(t) sum_i d_i off_i(t).
fn straight_through(gates: &Tensor, logits: &Tensor, x: &Tensor, set: &HeadSet) -> Result<Tensor> {
    // Scores of heads that are not shared, which are negative, have no gradient.
    let soft = sigmoid(&x.relu()?)?;
    let difference = (&soft - soft.detach())?;
    let [gate, logit] = [gates, logits].map(|x| x.flatten_all()?.to_vec1::<f32>());
    let (gate, logit) = (gate?, logit?);
    let (heads, routed) = (set.counts().num_heads, set.routed());
    let [mut off, mut gained, mut lost] = [(); 3].map(|()| vec![0f32; gate.len()]);
    for (first, (gate, logit)) in (0..).step_by(heads).zip(gate.chunks(heads).zip(logit.chunks(heads))) {
        // Of equals, the router selects the first.
        let weaker = |a: &usize, b: &usize| logit[*a].total_cmp(&logit[*b]).then(b.cmp(a));
        let Some(last) = routed.iter().copied().filter(|&head| gate[head] != 0.0).min_by(weaker) else { continue };
        lost[first + last] = gate[last];
        for &head in set.shared().iter().filter(|&&head| logit[head] < logit[last]) {
            off[first + head] = 1.0;
            gained[first + head] = gate[head];
        }
    }
    let [off, gained, lost] =
        [off, gained, lost].map(|numbers| Tensor::from_vec(numbers, gates.shape(), gates.device()));
    let places = off?.broadcast_mul(&difference)?.sum_keepdim(D::Minus1)?;
    let gates = (gates + gained?.broadcast_mul(&difference)?)?;
    Ok((gates - lost?.broadcast_mul(&places)?)?)
}

fn indices(heads: &[usize], device: &Device) -> candle_core::Result<Tensor> {
    Tensor::from_iter(heads.iter().map(|&head| head as u32), device)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn tensor(rows: &[[f32; 5]]) -> Tensor {
        Tensor::from_iter(rows.iter().flatten().copied(), &Device::Cpu).unwrap().reshape((1, rows.len(), 5)).unwrap()
    }

    fn numbers(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    fn near(found: &[f32], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        let differs = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() > 1e-5 * b.abs().max(1.0);
        assert!(!found.iter().zip(expected).any(differs), "{found:?}, expected {expected:?}");
    }

    /// Five heads, of which 0 and 2 are shared, and two of the others are on.
    #[test]
    fn straight_through_gradient_by_hand() {
        let scores = Var::new(&[0.1f32, -1.0, 0.05, -2.0, -0.5], &Device::Cpu).unwrap();
        let logits = tensor(&[[0.5, 1.0, 2.0, 1.5, -3.0], [-1.0, 0.3, 0.0, -0.2, 0.1]]);
        let of_gates = tensor(&[[5.0, 7.0, 11.0, 13.0, 17.0], [-2.0, 19.0, 23.0, 29.0, -31.0]]);
        let softmax = |a: f64, b: f64| [2.0 / (1.0 + (b - a).exp()), 2.0 / (1.0 + (a - b).exp())];
        // Two shared gates, and two routed ones: of heads 1 and 3, and of heads 1 and 4.
        let (first, second) = ((softmax(0.5, 2.0), softmax(1.0, 1.5)), (softmax(-1.0, 0.0), softmax(0.3, 0.1)));
        let of_logits = [
            first.0[0],
            first.1[0],
            first.0[1],
            first.1[1],
            0.0,
            second.0[0],
            second.1[0],
            second.0[1],
            0.0,
            second.1[1],
        ];
        let of_norms = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0];
        for (kind, gates) in [(Kind::TwoStage, of_logits), (Kind::QueryNorms, of_norms)] {
            let Computed { output, choice, margins } = route(kind, &logits, scores.as_tensor(), 4, None).unwrap();
            near(&numbers(&output), &gates);
            assert_eq!(numbers(&output)[4], 0.0);
            let choice = choice.unwrap();
            assert_eq!(numbers(&choice.selected), [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
            assert_eq!(margins.unwrap().dims(), [1, 2]);
            let found = (output * &of_gates).unwrap().sum_all().unwrap().backward().unwrap();
            let slope = |x: f64| SLOPE / (2.0 + x.exp() + (-x).exp());
            // The first token would be routed to head 2 anyway. Its weakest selected head is 1, the second one's 4.
            let of_0 = (gates[0] * 5.0 - gates[1] * 7.0) + (gates[5] * -2.0 - gates[9] * -31.0);
            let of_2 = gates[7] * 23.0 - gates[9] * -31.0;
            near(&numbers(found.get(&scores).unwrap()), &[slope(1.0) * of_0, 0.0, slope(0.5) * of_2, 0.0, 0.0]);
        }
    }

    /// Losses of the routing are about the routed heads: a query norm's logits are those of its own heads.
    #[test]
    fn logits_of_the_routed_heads() {
        let scores = Tensor::new(&[0.1f32, -1.0, 0.05, -2.0, -0.5], &Device::Cpu).unwrap();
        let logits = tensor(&[[0.5, 1.0, 2.0, 1.5, -3.0]]);
        let of = |kind| numbers(&route(kind, &logits, &scores, 4, None).unwrap().choice.unwrap().logits);
        near(&of(Kind::TwoStage), &[1.0, 1.5, -3.0]);
        let deviation = 6.083_333_333f64.sqrt();
        near(&of(Kind::QueryNorms), &[7.0, 10.0, -17.0].map(|x| x / 6.0 / deviation));
        assert!(route(Kind::Renormalized, &logits, &scores, 4, None).is_err());
    }

    #[test]
    fn one_head_stays_routed() {
        let split = |x: &[f32], active| split(&Tensor::new(x, &Device::Cpu).unwrap(), active).unwrap();
        let set = split(&[3.0, 1.0, 2.0, -1.0], 3);
        assert_eq!((set.shared(), set.counts().top_k), ([0, 2].as_slice(), 1));
        assert_eq!(split(&[1.0; 4], 3).shared(), [0, 1]);
        let set = split(&[0.0, f32::NAN, -0.0], 2);
        assert_eq!((set.shared(), set.counts().top_k), ([].as_slice(), 2));
    }

    /// The probability of noise above -x is sigmoid(x).
    #[test]
    fn noise_is_logistic() {
        let drawn: Vec<f32> =
            (0..4000).flat_map(|seed| noise(seed, 5, &Device::Cpu).unwrap().to_vec1::<f32>().unwrap()).collect();
        for x in [-2.0f32, 0.0, 1.0] {
            let share = drawn.iter().filter(|noise| **noise > -x).count() as f64 / drawn.len() as f64;
            let expected = 1.0 / (1.0 + f64::from(-x).exp());
            assert!((share - expected).abs() < 0.015, "above {}: {share}, expected {expected}", -x);
        }
        assert!(drawn.iter().all(|noise| noise.is_finite()));
    }

    /// exp(-x) of a score far below 0 is infinite.
    #[test]
    fn scores_far_from_0_have_finite_gradients() {
        let scores = Var::new(&[-50.0f32, 50.0, -9.0, 0.0, 9.0], &Device::Cpu).unwrap();
        let logits = tensor(&[[0.5, 1.0, 2.0, 1.5, -3.0]]);
        let output = route(Kind::TwoStage, &logits, scores.as_tensor(), 3, Some(1)).unwrap().output;
        let found = (output * &logits).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(numbers(found.get(&scores).unwrap()).iter().all(|g| g.is_finite()));
    }
}
