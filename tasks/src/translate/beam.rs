//! Beam search.

use crate::error::{Error, Result};

/// How to search.
#[derive(Debug, Clone, PartialEq)]
pub struct BeamOptions {
    /// Beam width; 1 is greedy search.
    pub beams: usize,
    /// A hypothesis's log-probability is divided by its length to this power: 0 prefers short ones, 1 takes the mean per token.
    pub length_penalty: f64,
    /// The most tokens of a hypothesis.
    pub max_tokens: usize,
    /// The token that the decoder begins with.
    pub start: i64,
    /// The token that ends a hypothesis; it is part of it.
    pub end: i64,
    /// A token that is never generated, if there is one.
    pub padding: Option<i64>,
}

/// A translation.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Its tokens, with the one that ends it if it came to its end.
    pub tokens: Vec<i64>,
    /// Log-probability over length to the power of the length penalty.
    pub score: f64,
}

/// A hypothesis that may go on.
struct Live {
    tokens: Vec<i64>,
    log_probability: f64,
}

struct Candidate {
    parent: usize,
    token: i64,
    log_probability: f64,
}

impl BeamOptions {
    fn problem(&self) -> Option<String> {
        if self.beams == 0 || self.max_tokens == 0 {
            return Some("expected at least one beam and one token".to_owned());
        }
        let penalty = self.length_penalty;
        (!penalty.is_finite()).then(|| format!("length penalty: expected a finite number, found {penalty}"))
    }

    fn score(&self, log_probability: f64, length: usize) -> f64 {
        log_probability / (length as f64).powf(self.length_penalty)
    }
}

/// The best hypotheses, the best first, at most one a beam.
///
/// `step` gets, for every row that is to be continued, the row of the call before that it continues and its newest token, and
/// gives the logits of what follows. The search is over once as many hypotheses ended as there are beams, as fairseq has it;
/// those that are cut off at the most tokens compare with them.
///
/// # Errors
/// [`Error::Setting`] for options out of range, [`Error::NoLogits`], and the errors of `step`.
pub(super) fn search(
    options: &BeamOptions,
    mut step: impl FnMut(&[usize], &[i64]) -> Result<Vec<Vec<f32>>>,
) -> Result<Vec<Hypothesis>> {
    if let Some(problem) = options.problem() {
        return Err(Error::Setting(problem));
    }
    let mut live = vec![Live { tokens: Vec::new(), log_probability: 0.0 }];
    let (mut parents, mut newest) = (vec![0], vec![options.start]);
    let mut ended = Vec::new();
    for length in 1..=options.max_tokens {
        let logits = step(&parents, &newest)?;
        // As in fairseq, a translation has a token beside the last one, where the model permits any.
        let mut candidates = best(&live, &logits, options, length > 1);
        if candidates.is_empty() {
            candidates = best(&live, &logits, options, true);
        }
        if candidates.is_empty() {
            return Err(Error::NoLogits);
        }
        let mut next = Vec::with_capacity(options.beams);
        (parents, newest) = (Vec::new(), Vec::new());
        for (rank, candidate) in candidates.into_iter().enumerate() {
            let Candidate { parent, token, log_probability } = candidate;
            let tokens = || live[parent].tokens.iter().copied().chain([token]).collect();
            if token == options.end {
                if rank < options.beams {
                    let score = options.score(log_probability, length);
                    ended.push(Hypothesis { tokens: tokens(), score });
                }
            } else if next.len() < options.beams {
                parents.push(parent);
                newest.push(token);
                next.push(Live { tokens: tokens(), log_probability });
            }
        }
        live = next;
        if ended.len() >= options.beams || live.is_empty() {
            live.clear();
            break;
        }
    }
    ended.extend(live.into_iter().map(|live| {
        let score = options.score(live.log_probability, live.tokens.len());
        Hypothesis { tokens: live.tokens, score }
    }));
    ended.sort_by(|a, b| b.score.total_cmp(&a.score));
    ended.truncate(options.beams);
    Ok(ended)
}

/// The most probable continuations, twice as many as there are beams, so that enough go on whatever ends; among equals the
/// earlier row and the lower token come first. `may_end`: whether the token that ends texts is one of them.
fn best(live: &[Live], logits: &[Vec<f32>], options: &BeamOptions, may_end: bool) -> Vec<Candidate> {
    let wanted = 2 * options.beams;
    let order = |a: &Candidate, b: &Candidate| {
        let by_probability = b.log_probability.total_cmp(&a.log_probability);
        by_probability.then(a.parent.cmp(&b.parent)).then(a.token.cmp(&b.token))
    };
    let mut all = Vec::new();
    for (parent, (hypothesis, logits)) in live.iter().zip(logits).enumerate() {
        let most = logits.iter().copied().filter(|x| !x.is_nan()).fold(f32::NEG_INFINITY, f32::max);
        if !most.is_finite() {
            continue;
        }
        let sum: f64 = logits.iter().filter(|x| !x.is_nan()).map(|&x| (f64::from(x) - f64::from(most)).exp()).sum();
        let offset = hypothesis.log_probability - f64::from(most) - sum.ln();
        let candidate =
            |(token, &logit): (i64, &f32)| Candidate { parent, token, log_probability: f64::from(logit) + offset };
        let possible = |candidate: &Candidate| {
            candidate.log_probability > f64::NEG_INFINITY
                && Some(candidate.token) != options.padding
                && (may_end || candidate.token != options.end)
        };
        let mut row: Vec<Candidate> = (0..).zip(logits).map(candidate).filter(possible).collect();
        if row.len() > wanted {
            row.select_nth_unstable_by(wanted, order);
            row.truncate(wanted);
        }
        all.append(&mut row);
    }
    all.sort_by(order);
    all.truncate(wanted);
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::random::Random;

    const VOCABULARY: i64 = 4;
    const END: i64 = 2;

    /// Logits that depend on the whole prefix.
    fn logits(seed: u64, prefix: &[i64]) -> Vec<f32> {
        let stream = prefix.iter().fold(1u64, |hash, &token| hash * 7 + token as u64 + 1);
        let mut random = Random::new(seed, stream);
        (0..VOCABULARY).map(|_| 2.0 * random.normal() as f32).collect()
    }

    fn log_softmax(logits: &[f32]) -> Vec<f64> {
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        logits.iter().map(|&x| f64::from(x) - sum.ln()).collect()
    }

    fn options(beams: usize, length_penalty: f64, max_tokens: usize) -> BeamOptions {
        BeamOptions { beams, length_penalty, max_tokens, start: END, end: END, padding: Some(1) }
    }

    fn searched(seed: u64, options: &BeamOptions) -> Vec<Hypothesis> {
        let mut rows: Vec<Vec<i64>> = vec![Vec::new()];
        let mut first = true;
        let step = |parents: &[usize], tokens: &[i64]| {
            if !std::mem::take(&mut first) {
                rows = parents.iter().zip(tokens).map(|(&row, &token)| [&rows[row][..], &[token]].concat()).collect();
            }
            Ok(rows.iter().map(|row| logits(seed, row)).collect())
        };
        search(options, step).unwrap()
    }

    /// Every hypothesis there is, the best first.
    fn exhaustive(seed: u64, options: &BeamOptions) -> Vec<Hypothesis> {
        let (mut open, mut all) = (vec![(Vec::new(), 0.0)], Vec::new());
        for length in 1..=options.max_tokens {
            let mut next = Vec::new();
            for (prefix, sum) in open {
                for (token, p) in (0..).zip(log_softmax(&logits(seed, &prefix))).filter(|(token, _)| *token != 1) {
                    if length == 1 && token == options.end {
                        continue;
                    }
                    let (tokens, sum): (Vec<i64>, f64) = ([&prefix[..], &[token]].concat(), sum + p);
                    if token == options.end || length == options.max_tokens {
                        let score = sum / (length as f64).powf(options.length_penalty);
                        all.push(Hypothesis { tokens, score });
                    } else {
                        next.push((tokens, sum));
                    }
                }
            }
            open = next;
        }
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }

    #[test]
    fn wide_beams_find_what_an_exhaustive_search_finds() {
        for seed in 0..20 {
            for (penalty, max_tokens) in [(0.0, 4), (0.6, 4), (1.0, 4), (1.5, 3), (1.0, 1)] {
                let options = options(64, penalty, max_tokens);
                let (found, expected) = (searched(seed, &options), exhaustive(seed, &options));
                assert_eq!(found.len(), expected.len().min(64));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found.tokens, expected.tokens, "seed {seed}, {options:?}");
                    assert!((found.score - expected.score).abs() < 1e-9);
                }
            }
        }
    }

    #[test]
    fn one_beam_is_greedy_and_more_are_not_worse() {
        let (mut better, mut worse) = (0, 0);
        for seed in 0..100 {
            let mut tokens: Vec<i64> = Vec::new();
            while tokens.last() != Some(&END) && tokens.len() < 6 {
                let scores = logits(seed, &tokens);
                tokens.push(
                    (0..VOCABULARY)
                        .filter(|&t| t != 1 && (t != END || !tokens.is_empty()))
                        .max_by(|&a, &b| scores[a as usize].total_cmp(&scores[b as usize]))
                        .unwrap(),
                );
            }
            let greedy = searched(seed, &options(1, 0.6, 6));
            assert_eq!(greedy.len(), 1);
            assert_eq!(greedy[0].tokens, tokens, "seed {seed}");
            let four = searched(seed, &options(4, 0.6, 6));
            better += usize::from(four[0].score > greedy[0].score + 1e-12);
            worse += usize::from(four[0].score < greedy[0].score - 1e-12);
        }
        assert!(better > 2 * worse, "{better} better, {worse} worse");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let nothing = |_: &[usize], _: &[i64]| Ok(vec![vec![f32::NAN; 4]]);
        for bad in [options(0, 1.0, 4), options(1, 1.0, 0), options(1, f64::NAN, 4)] {
            assert!(matches!(search(&bad, nothing), Err(Error::Setting(_))));
        }
        assert!(search(&options(1, 1.0, 4), nothing).unwrap_err().to_string().contains("no logit is a number"));
    }
}
