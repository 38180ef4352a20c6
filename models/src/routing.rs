//! What the routers of a forward decided, and the losses that keep their heads and experts in balance during training.
//!
//! [`crate::eager::Eager::with_routing`] keeps a [`Routing`] of every layer. Probabilities and gates are part of candle's graph:
//! gradients of a loss reach the routers' weights and what is before them.

use crate::error::{Error, Result};
use candle_core::{D, DType, Tensor};
use moh_operators::top_k_router::Kind;

/// A router's scores and which of its candidates it selected. Candidates are the routed heads in ascending order, or the experts.
///
/// A token has one row, or one for each group of its heads or experts that choose among their own: q_len is then groups times longer, with
/// a token's groups next to each other.
#[derive(Debug, Clone)]
pub struct Choice {
    /// What the router is.
    pub kind: Kind,
    /// (batch, q_len, candidates), float32: what the probabilities are the softmax of.
    pub logits: Tensor,
    /// (batch, q_len, candidates), float32: probabilities before the selection.
    pub probabilities: Tensor,
    /// (batch, q_len, candidates), float32: 1 for the selected ones, else 0. Not differentiable.
    pub selected: Tensor,
}

/// A layer's routing in one forward.
#[derive(Debug, Clone)]
pub struct Routing {
    /// The module's path: `blocks.2.attn`.
    pub path: String,
    /// The router's decision.
    pub choice: Choice,
    /// (batch, q_len, num_heads), float32: the gates as the layer used them, 0 for every head or expert of a padded token.
    pub gates: Tensor,
}

impl Routing {
    /// MoH's load-balance loss of the layer (arXiv 2410.11842), a scalar: `R^2 mean_i(mean_tokens(p_i) mean_tokens([i selected]))` over its
    /// R routed heads. It is top_k where all are equally likely and equally often selected, and grows where both prefer the same heads.
    ///
    /// The published code adds 0.01 times the mean over the layers to ViT's loss. Where each group of heads chooses among its own, it is
    /// the mean of the groups' losses.
    ///
    /// # Errors
    /// What candle fails with.
    pub fn load_balance(&self) -> Result<Tensor> {
        let candidates = self.choice.probabilities.dim(D::Minus1)?;
        // The heads of all groups side by side.
        let rows = self.gates.elem_count() / self.gates.dim(D::Minus1)?.max(1);
        let probability = self.choice.probabilities.reshape((rows, ()))?.mean(0)?;
        let load = self.choice.selected.reshape((rows, ()))?.mean(0)?;
        Ok(((probability * load)?.mean_all()? * (candidates * candidates) as f64)?)
    }

    /// MoA's losses of the layer, whose candidates are experts (arXiv 2210.05144), as the published code computes them.
    ///
    /// # Errors
    /// A router of heads, which has other losses; what candle fails with.
    pub fn experts(&self) -> Result<ExpertLosses> {
        let of_experts = matches!(self.choice.kind, Kind::Probabilities | Kind::Renormalized);
        // Groups, or heads that are always on.
        if !of_experts || self.choice.selected.dims() != self.gates.dims() {
            return Err(Error::Internal("losses of experts from a router of heads"));
        }
        let gates = tokens(&self.gates)?;
        let experts = gates.dim(1)?;
        let on = gates.ne(0f32)?.to_dtype(DType::F32)?;
        // A padded token has no experts: its probabilities do not count, but its logits do.
        let is_token = on.max_keepdim(1)?;
        let probability = share(&tokens(&self.choice.probabilities)?.broadcast_mul(&is_token)?.sum(0)?)?;
        let load = share(&on.sum(0)?)?;
        let switch = ((probability * load)?.sum_all()? * experts as f64)?;

        let importance = share(&gates.sum(0)?)?;
        let mean = importance.mean_all()?;
        let deviation = importance.broadcast_sub(&mean)?;
        let variance = (deviation.sqr()?.sum_all()? / (experts as f64 - 1.0).max(1.0))?;
        let cv = (variance / (mean.sqr()? + 1e-10)?)?;

        let z = tokens(&self.choice.logits)?.log_sum_exp(1)?.sqr()?.mean_all()?;
        Ok(ExpertLosses { cv, switch, z })
    }

    /// How often each head or expert is on: a share of the tokens each, padded ones included.
    ///
    /// # Errors
    /// What candle fails with.
    pub fn load(&self) -> Result<Vec<f32>> {
        Ok(tokens(&self.gates)?.ne(0f32)?.to_dtype(DType::F32)?.mean(0)?.to_vec1()?)
    }
}

/// MoA's losses of one layer, scalars each. The published code's total is `cvloss * cv + switchloss * switch + zloss * z`, added up
/// over all layers with experts.
#[derive(Debug, Clone)]
pub struct ExpertLosses {
    /// Squared coefficient of variation of the experts' summed gates.
    pub cv: Tensor,
    /// `E sum_e(share of probability of e * share of tokens of e)` over E experts: 1 if they are used alike.
    pub switch: Tensor,
    /// Mean squared logarithm of the sum of the exponentials of the logits, padded tokens included.
    pub z: Tensor,
}

/// The mean of MoH's load-balance losses over the layers; `None` where no layer routes heads.
///
/// # Errors
/// What candle fails with.
pub fn load_balance(layers: &[Routing]) -> Result<Option<Tensor>> {
    let losses = layers.iter().map(Routing::load_balance).collect::<Result<Vec<_>>>()?;
    Ok(match losses.is_empty() {
        true => None,
        false => Some(Tensor::stack(&losses, 0)?.mean_all()?),
    })
}

/// (batch * q_len, candidates).
fn tokens(x: &Tensor) -> Result<Tensor> {
    Ok(x.flatten_to(D::Minus2)?)
}

/// x / sum(x).
fn share(x: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_div(&x.sum_all()?)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::operators::{Computed, ModelOperator};
    use candle_core::{Device, Var};
    use moh_operators::top_k_router::{Attributes, Inputs, TopKRouter};

    /// Six heads (0 and 3 shared) or six experts, of which two are selected, for four tokens.
    fn route(kind: Kind, scores: &Tensor) -> Routing {
        let shared_heads = if kind == Kind::TwoStage { vec![0, 3] } else { vec![] };
        let attributes = Attributes { kind, num_heads: 6, top_k: 2, shared_heads };
        let computed = TopKRouter::compute(&attributes, &Inputs { scores }).unwrap();
        Routing { path: "layer".to_owned(), choice: computed.choice.unwrap(), gates: computed.output }
    }

    /// (1, 4, width) distinct numbers, whose order is another for every token; the second is among the largest.
    fn scores(width: usize) -> Tensor {
        let boost = |i: usize| if i % width == 1 { 2.05 } else { 0.0 };
        let number = |i: usize| ((i * 37 + i / width * 11) % 29) as f32 / 9.0 - 1.5 + boost(i);
        Tensor::from_iter((0..4 * width).map(number), &Device::Cpu).unwrap().reshape((1, 4, width)).unwrap()
    }

    fn total(kind: Kind, scores: &Tensor) -> Tensor {
        let routing = route(kind, scores);
        match kind {
            Kind::TwoStage => routing.load_balance().unwrap(),
            _ => {
                let ExpertLosses { cv, switch, z } = routing.experts().unwrap();
                ((cv + switch).unwrap() + z).unwrap()
            }
        }
    }

    /// Four routed heads used in turn and likely alike.
    #[test]
    fn balanced_heads_have_the_smallest_loss() {
        let logits = [[9.0, 9.0, 0.0, 0.0], [0.0, 0.0, 9.0, 9.0], [9.0, 0.0, 9.0, 0.0], [0.0, 9.0, 0.0, 9.0f32]];
        let rest = Tensor::zeros((1, 4, 4), DType::F32, &Device::Cpu).unwrap();
        let loss = |logits: &[[f32; 4]; 4]| {
            let routed = Tensor::new(logits, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let routing = route(Kind::TwoStage, &Tensor::cat(&[&routed, &rest], 2).unwrap());
            (routing.load_balance().unwrap().to_scalar::<f32>().unwrap(), routing.load().unwrap())
        };
        // R^2 mean_i(1/4 * 2/4) with R = 4.
        let (balanced, load) = loss(&logits);
        assert!((balanced - 2.0).abs() < 1e-6, "{balanced}");
        assert_eq!(load, [1.0, 0.5, 0.5, 1.0, 0.5, 0.5]);
        let (biased, load) = loss(&[logits[0]; 4]);
        assert!(biased > 3.9, "{biased}");
        assert_eq!(load, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]);
    }

    /// The gate of a single selected head is 1, whatever its score: the scores learn from the balance alone, and from that only where
    /// heads are not used alike.
    #[test]
    fn one_routed_head_learns_from_the_balance_alone() {
        let gradients = |favours: [f32; 4]| {
            let rows: Vec<f32> = favours.iter().flat_map(|favour| [*favour, 0.0, 0.3, -0.2]).collect();
            let scores = Var::from_vec(rows, (1, 4, 4), &Device::Cpu).unwrap();
            let attributes = Attributes { kind: Kind::TwoStage, num_heads: 3, top_k: 1, shared_heads: vec![0] };
            let Computed { output, choice, .. } =
                TopKRouter::compute(&attributes, &Inputs { scores: scores.as_tensor() }).unwrap();
            let routing = Routing { path: "layer".to_owned(), choice: choice.unwrap(), gates: output.clone() };
            let weights = Tensor::arange(1f32, 13.0, &Device::Cpu).unwrap().reshape((1, 4, 3)).unwrap();
            let outputs = (output * weights).unwrap().sum_all().unwrap();
            [outputs, routing.load_balance().unwrap()].map(|loss| {
                let gradients = loss.backward().unwrap();
                let routed = gradients.get(&scores).unwrap().narrow(2, 0, 2).unwrap().abs().unwrap();
                routed.max_all().unwrap().to_scalar::<f32>().unwrap()
            })
        };
        let [outputs, balance] = gradients([1.0, 1.0, 1.0, -1.0]);
        assert!(outputs < 1e-6 && balance > 0.01, "{outputs} {balance}");
        let [outputs, balance] = gradients([1.0, 1.0, -1.0, -1.0]);
        assert!(outputs < 1e-6 && balance < 1e-6, "{outputs} {balance}");
    }

    /// Four tokens, whose last one has queries of 0.
    #[test]
    fn norms_of_queries_have_gradients() {
        let mut queries: Vec<f32> = (0..4 * 24).map(|i| ((i * 37 + 11) % 29) as f32 / 9.0 - 1.5).collect();
        queries[3 * 24..].fill(0.0);
        let balance = |queries: Vec<f32>| {
            let queries = Var::from_vec(queries, (1, 4, 24), &Device::Cpu).unwrap();
            let loss = route(Kind::QueryNorms, queries.as_tensor()).load_balance().unwrap();
            (loss.to_scalar::<f32>().unwrap(), loss.backward().unwrap().get(&queries).unwrap().clone())
        };
        let gradient = balance(queries.clone()).1.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(gradient[3 * 24..].iter().all(|g| *g == 0.0), "{gradient:?}");
        for i in 0..3 * 24 {
            const STEP: f32 = 1e-2;
            let moved = |step: f32| {
                let mut queries = queries.clone();
                queries[i] += step;
                balance(queries).0
            };
            let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            assert!((gradient[i] - expected).abs() < 2e-3, "query {i}: {}, expected {expected}", gradient[i]);
        }
        assert!(gradient.iter().any(|g| g.abs() > 1e-2), "{gradient:?}");
    }

    #[test]
    fn gradients_equal_finite_differences() {
        const STEP: f64 = 1e-2;
        for (kind, width) in [(Kind::TwoStage, 8), (Kind::Probabilities, 6), (Kind::Renormalized, 6)] {
            let given = scores(width);
            let var = Var::from_tensor(&given).unwrap();
            let gradients = total(kind, var.as_tensor()).backward().unwrap();
            let gradient = gradients.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(gradient.iter().any(|g| g.abs() > 1e-3), "{kind:?}: {gradient:?}");
            for (i, &found) in gradient.iter().enumerate() {
                let moved = |step: f64| {
                    let mut one = vec![0f32; 4 * width];
                    one[i] = step as f32;
                    let moved = (&given + Tensor::from_vec(one, given.shape(), &Device::Cpu).unwrap()).unwrap();
                    let same = route(kind, &moved).choice.selected.to_vec3::<f32>().unwrap();
                    assert_eq!(
                        same,
                        route(kind, &given).choice.selected.to_vec3::<f32>().unwrap(),
                        "another selection"
                    );
                    f64::from(total(kind, &moved).to_scalar::<f32>().unwrap())
                };
                let expected = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (f64::from(found) - expected).abs() < 2e-3,
                    "{kind:?}, score {i}: {found}, expected {expected}"
                );
            }
        }
    }
}
