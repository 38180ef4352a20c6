//! What completions and chat completions have in common.

use super::unsupported;
use crate::door;
use crate::problem::Problem;
use moh_tasks::generate::{Chooser, Sampling, StopTexts};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use utoipa::ToSchema;

/// As many as are of use; each is looked for in every text.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 1024;

/// How a text is generated.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(super) struct Options {
    /// The most tokens; default: 16 for completions; for chats, what the model and the memory for caches leave, and 1024 where neither has a limit.
    pub(super) max_tokens: Option<usize>,
    /// Another name of `max_tokens`.
    pub(super) max_completion_tokens: Option<usize>,
    /// 0 to 2; 0 takes the most probable token each time. Default: 1.
    temperature: Option<f64>,
    /// 0 to 1: samples from the most probable tokens whose probabilities add up to this. Default: 1.
    top_p: Option<f64>,
    /// Samples from this many of the most probable tokens; 0 or -1: from all, as without it. Not part of OpenAI's API.
    top_k: Option<i64>,
    /// The same seed gives the same tokens. Default: another one each time.
    seed: Option<i64>,
    /// Texts to stop before, at most 16.
    stop: Option<Stop>,
    /// Whether to go on after a token that ends texts. Not part of OpenAI's API.
    pub(super) ignore_eos: Option<bool>,
    /// Whether to send the text in pieces, as server-sent events.
    stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    /// Texts for each prompt. Default: 1. They differ where tokens are drawn, with a temperature above 0.
    n: Option<u64>,
    /// Only 1, or `n`.
    best_of: Option<u64>,
    /// Only null or empty.
    suffix: Option<String>,
    /// Only 0.
    presence_penalty: Option<f64>,
    /// Only 0.
    frequency_penalty: Option<f64>,
    /// Only 1. Not part of OpenAI's API.
    repetition_penalty: Option<f64>,
    /// Only 1. Not part of OpenAI's API.
    repeat_penalty: Option<f64>,
    /// Only 1. Not part of OpenAI's API.
    length_penalty: Option<f64>,
    /// Only false. Not part of OpenAI's API.
    use_beam_search: Option<bool>,
    /// Only 0. Not part of OpenAI's API.
    mirostat: Option<u64>,
    /// Only 1. Not part of OpenAI's API.
    typical_p: Option<f64>,
    /// Only 1. Not part of OpenAI's API.
    tfs: Option<f64>,
    /// Only 0. Not part of OpenAI's API.
    top_a: Option<f64>,
    /// Only 0. Not part of OpenAI's API.
    min_p: Option<f64>,
    /// Only 0. Not part of OpenAI's API.
    min_tokens: Option<u64>,
    /// Only null or empty. Not part of OpenAI's API.
    #[schema(value_type = Option<Vec<i64>>)]
    stop_token_ids: Option<Value>,
    /// Only null or empty.
    #[schema(value_type = Option<Object>)]
    logit_bias: Option<Value>,
    /// Only text.
    #[schema(value_type = Option<Object>)]
    response_format: Option<Value>,
    /// Only null. Not part of OpenAI's API.
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Value>,
    /// Only null. Not part of OpenAI's API.
    #[schema(value_type = Option<Object>)]
    guided_json: Option<Value>,
    /// Only null. Not part of OpenAI's API.
    #[schema(value_type = Option<String>)]
    guided_regex: Option<Value>,
    /// Only null. Not part of OpenAI's API.
    #[schema(value_type = Option<Vec<String>>)]
    guided_choice: Option<Value>,
    /// Only null. Not part of OpenAI's API.
    #[schema(value_type = Option<String>)]
    guided_grammar: Option<Value>,
    /// Only null or empty.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// Only null or empty.
    #[schema(value_type = Option<Vec<Object>>)]
    functions: Option<Value>,
    /// Only null, `none` or `auto`.
    #[schema(value_type = Option<String>)]
    tool_choice: Option<Value>,
    /// Only null, `none` or `auto`.
    #[schema(value_type = Option<String>)]
    function_call: Option<Value>,
}

#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub(super) struct StreamOptions {
    /// Whether the last event before [DONE] tells the numbers of tokens.
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text, or several")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// A request that has [`Options`] flattened into it.
///
/// # Errors
/// As [`door::parse`].
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    // Of flattened fields no name is known, but of the options alone.
    door::parse(body).map_err(|problem| door::parse::<Options>(body).err().unwrap_or(problem))
}

impl Options {
    /// Refuses what is not supported, so that nobody takes another text for the one that was asked for.
    ///
    /// # Errors
    /// A [`Problem`] naming the field.
    pub(super) fn check(&self) -> Result<(), Problem> {
        let empty = |value: &Option<Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        let free = |value: &Option<Value>| {
            value.as_ref().is_none_or(|value| value.is_null() || value == "none" || value == "auto")
        };
        let plain = self.response_format.as_ref().is_none_or(|format| format.is_null() || format["type"] == "text");
        for (what, supported, expected) in [
            ("best_of", self.best_of.is_none_or(|best| best == 1 || Some(best) == self.n), "1, or n"),
            ("suffix", self.suffix.as_deref().is_none_or(str::is_empty), "none"),
            ("presence_penalty", self.presence_penalty.is_none_or(|penalty| penalty == 0.0), "0"),
            ("frequency_penalty", self.frequency_penalty.is_none_or(|penalty| penalty == 0.0), "0"),
            ("repetition_penalty", self.repetition_penalty.is_none_or(|penalty| penalty == 1.0), "1"),
            ("repeat_penalty", self.repeat_penalty.is_none_or(|penalty| penalty == 1.0), "1"),
            ("length_penalty", self.length_penalty.is_none_or(|penalty| penalty == 1.0), "1"),
            ("use_beam_search", self.use_beam_search != Some(true), "false"),
            ("mirostat", self.mirostat.is_none_or(|version| version == 0), "0"),
            ("typical_p", self.typical_p.is_none_or(|share| share == 1.0), "1"),
            ("tfs", self.tfs.is_none_or(|share| share == 1.0), "1"),
            ("top_a", self.top_a.is_none_or(|share| share == 0.0), "0"),
            ("min_p", self.min_p.is_none_or(|least| least == 0.0), "0"),
            ("min_tokens", self.min_tokens.is_none_or(|least| least == 0), "0"),
            ("stop_token_ids", empty(&self.stop_token_ids), "none"),
            ("logit_bias", empty(&self.logit_bias), "none"),
            ("response_format", plain, "text"),
            ("structured_outputs", self.structured_outputs.is_none(), "none"),
            ("guided_json", self.guided_json.is_none(), "none"),
            ("guided_regex", self.guided_regex.is_none(), "none"),
            ("guided_choice", self.guided_choice.is_none(), "none"),
            ("guided_grammar", self.guided_grammar.is_none(), "none"),
            ("tools", empty(&self.tools), "none"),
            ("functions", empty(&self.functions), "none"),
            ("tool_choice", free(&self.tool_choice), "none or auto"),
            ("function_call", free(&self.function_call), "none or auto"),
        ] {
            if !supported {
                return Err(unsupported(what, expected));
            }
        }
        Ok(())
    }

    /// Texts for each prompt.
    ///
    /// # Errors
    /// A [`Problem`] where there are none.
    pub(super) fn texts_a_prompt(&self) -> Result<usize, Problem> {
        match self.n.unwrap_or(1) {
            0 => Err(Problem::invalid("n: expected at least 1, found 0")),
            n => Ok(usize::try_from(n).unwrap_or(usize::MAX)),
        }
    }

    /// The most tokens, if it is said.
    ///
    /// # Errors
    /// A [`Problem`] where it is 0, except with `echo`, or said twice and not the same.
    pub(super) fn most(&self, echo: bool) -> Result<Option<usize>, Problem> {
        match (self.max_tokens, self.max_completion_tokens) {
            (Some(0), _) | (_, Some(0)) if !echo => Err(Problem::invalid("max_tokens: expected at least 1, found 0")),
            (Some(a), Some(b)) if a != b => {
                Err(Problem::invalid(format!("max_tokens is {a}, and max_completion_tokens {b}: expected one of them")))
            }
            (a, b) => Ok(a.or(b)),
        }
    }

    /// How tokens are drawn, of each of a prompt's texts.
    ///
    /// # Errors
    /// A [`Problem`] for a number out of its range.
    pub(super) fn choosers(&self, texts: usize) -> Result<Vec<Chooser>, Problem> {
        let temperature = self.temperature.unwrap_or(1.0);
        if !(0.0..=2.0).contains(&temperature) {
            return Err(Problem::invalid(format!("temperature: expected 0 to 2, found {temperature}")));
        }
        let seed = self.seed.map_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0, |seed| seed as u64);
        let (top_k, top_p) = (self.top_k()?, self.top_p.unwrap_or(1.0));
        // Checked with a temperature that can be, although it may not be used.
        let sampling = Sampling { temperature: temperature.max(f64::MIN_POSITIVE), top_k, top_p, seed };
        let chooser = |sampling: Option<Sampling>, text: u64| {
            Chooser::new(sampling, text).map_err(|e| Problem::invalid(e.to_string()))
        };
        chooser(Some(sampling.clone()), 0)?;
        (0..).take(texts).map(|text| chooser(Some(sampling.clone()).filter(|_| temperature > 0.0), text)).collect()
    }

    /// The number of tokens to draw from, if it is limited: llama.cpp's clients say 0 for all, vLLM's -1.
    fn top_k(&self) -> Result<Option<usize>, Problem> {
        match self.top_k {
            None | Some(-1 | 0) => Ok(None),
            Some(most) => usize::try_from(most).map(Some).map_err(|_| {
                Problem::invalid(format!("top_k: expected 1 or more, or 0 or -1 for no limit, found {most}"))
            }),
        }
    }

    /// Texts to stop before.
    ///
    /// # Errors
    /// A [`Problem`] for too many, an empty or a very long one.
    pub(super) fn stops(&mut self) -> Result<StopTexts, Problem> {
        let texts = match self.stop.take() {
            None => Vec::new(),
            Some(Stop::One(text)) => vec![text],
            Some(Stop::Several(texts)) => texts,
        };
        if texts.len() > MOST_STOPS {
            return Err(Problem::invalid(format!("stop: expected at most {MOST_STOPS} texts, found {}", texts.len())));
        }
        if texts.iter().any(|text| text.is_empty() || text.len() > LONGEST_STOP) {
            return Err(Problem::invalid(format!("stop: expected texts of 1 to {LONGEST_STOP} bytes")));
        }
        Ok(StopTexts::new(texts))
    }

    /// Whether the text is sent in pieces.
    pub(super) fn is_stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether the numbers of tokens end a stream.
    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn options(value: Value) -> Options {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for field in [
            json!({"best_of": 3}),
            json!({"suffix": "x"}),
            json!({"presence_penalty": 0.5}),
            json!({"frequency_penalty": -1}),
            json!({"logit_bias": {"5": 1}}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"tools": [{}]}),
            json!({"functions": [{}]}),
            json!({"repetition_penalty": 1.2}),
            json!({"repeat_penalty": 1.2}),
            json!({"length_penalty": 0}),
            json!({"use_beam_search": true}),
            json!({"mirostat": 2}),
            json!({"typical_p": 0.9}),
            json!({"tfs": 0.5}),
            json!({"top_a": 0.1}),
            json!({"structured_outputs": {"json": {}}}),
            json!({"guided_json": {"type": "object"}}),
            json!({"guided_json": {}}),
            json!({"guided_regex": "a*"}),
            json!({"guided_choice": ["a", "b"]}),
            json!({"guided_grammar": "root ::= a"}),
            json!({"min_p": 0.1}),
            json!({"min_tokens": 3}),
            json!({"stop_token_ids": [3]}),
            json!({"tool_choice": "required"}),
            json!({"tool_choice": {"type": "function"}}),
            json!({"function_call": {"name": "f"}}),
        ] {
            let name = field.as_object().unwrap().keys().next().unwrap().clone();
            let problem = options(field).check().unwrap_err().message;
            assert!(problem.starts_with(&format!("{name}: not supported")), "{problem}");
        }
        let harmless = json!({"n": 2, "best_of": 2, "tools": [], "logit_bias": {}, "presence_penalty": 0,
            "response_format": {"type": "text"}, "user": "somebody", "echo": false, "tool_choice": "auto", "function_call": "none",
            "repetition_penalty": 1.0, "min_p": 0, "min_tokens": 0, "stop_token_ids": null, "repeat_penalty": 1, "length_penalty": 1.0,
            "use_beam_search": false, "mirostat": 0, "typical_p": 1, "tfs": 1.0, "top_a": 0, "structured_outputs": null,
            "guided_json": null, "guided_regex": null, "guided_choice": null, "guided_grammar": null, "unknown": 5});
        assert_eq!(options(harmless).check(), Ok(()));
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in
            [json!({"temperature": -0.1}), json!({"temperature": 2.5}), json!({"top_p": 1.5}), json!({"top_k": -2})]
        {
            assert!(options(bad.clone()).choosers(1).is_err(), "{bad}");
            // Also where they would not be used.
            let mut greedy = bad.clone();
            greedy.as_object_mut().unwrap().entry("temperature").or_insert(json!(0));
            assert!(options(greedy).choosers(1).is_err(), "{bad}");
        }
        assert!(options(json!({"temperature": 0, "seed": -5})).choosers(1).is_ok());
        assert!(options(json!({"max_tokens": 0})).most(false).is_err());
        assert_eq!(options(json!({"max_tokens": 0})).most(true), Ok(Some(0)));
        assert!(options(json!({"max_tokens": 1, "max_completion_tokens": 2})).most(true).is_err());
        assert_eq!(options(json!({"max_completion_tokens": 2})).most(false), Ok(Some(2)));
        assert!(options(json!({"n": 0})).texts_a_prompt().is_err());
        assert_eq!(options(json!({"n": 3})).texts_a_prompt(), Ok(3));
    }

    #[test]
    fn a_top_k_of_0_or_less_by_one_is_no_limit() {
        let top_k = |value: Value| options(json!({ "top_k": value })).top_k().map_err(|problem| problem.message);
        for none in [json!(0), json!(-1), json!(null)] {
            assert_eq!(top_k(none), Ok(None));
        }
        assert_eq!(top_k(json!(7)), Ok(Some(7)));
        let refused = top_k(json!(-2)).unwrap_err();
        assert_eq!(refused, "top_k: expected 1 or more, or 0 or -1 for no limit, found -2");
        assert!(options(json!({"top_k": -1})).choosers(1).is_ok() && options(json!({"top_k": 0})).choosers(1).is_ok());
    }

    #[test]
    fn stop_texts_are_bounded() {
        assert!(options(json!({"stop": ["a", "b"]})).stops().is_ok());
        assert!(options(json!({"stop": "a"})).stops().is_ok());
        assert!(options(json!({"stop": ""})).stops().is_err());
        assert!(options(json!({"stop": vec!["a"; 17]})).stops().is_err());
        assert!(options(json!({"stop": "a".repeat(1025)})).stops().is_err());
    }
}
