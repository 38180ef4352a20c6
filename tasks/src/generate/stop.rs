//! Texts that end a sequence.

/// Cuts a text that comes piece by piece before the first of some stop texts.
#[derive(Debug, Clone, Default)]
pub struct StopTexts {
    texts: Vec<String>,
    /// Text that may be the beginning of a stop text.
    held: String,
    reached: bool,
}

impl StopTexts {
    /// Stops before each of `texts`, none of which is empty.
    pub fn new(texts: Vec<String>) -> StopTexts {
        StopTexts { texts: texts.into_iter().filter(|text| !text.is_empty()).collect(), ..StopTexts::default() }
    }

    /// Whether a stop text has come: nothing is given out any more.
    pub fn reached(&self) -> bool {
        self.reached
    }

    /// What is certain to come before a stop text, once `piece` is known.
    pub fn push(&mut self, piece: &str) -> String {
        if self.reached {
            return String::new();
        }
        self.held += piece;
        if let Some(at) = self.texts.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            self.reached = true;
            return std::mem::take(&mut self.held);
        }
        let may_begin = |start: &usize| {
            let end = &self.held[*start..];
            self.texts.iter().any(|stop| stop.starts_with(end))
        };
        let starts = self.held.char_indices().map(|(start, _)| start);
        let certain = starts.into_iter().find(may_begin).unwrap_or(self.held.len());
        self.held.drain(..certain).collect()
    }

    /// What was held back, at the end.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_text_in_several_pieces() {
        let mut stop = StopTexts::new(vec!["END".to_owned(), "é!".to_owned(), String::new()]);
        let pieces = ["one E", "NE", "N", "X two é", "?", " E", "N", "D three"];
        let given: Vec<String> = pieces.iter().map(|piece| stop.push(piece)).collect();
        assert_eq!(given, ["one ", "EN", "", "ENX two ", "é?", " ", "", ""]);
        assert!(stop.reached() && stop.push("four").is_empty() && stop.finish().is_empty());
    }

    #[test]
    fn what_only_began_like_a_stop_text_is_given_out_at_the_end() {
        let mut stop = StopTexts::new(vec!["END".to_owned()]);
        assert_eq!((stop.push("the EN"), stop.finish(), stop.reached()), ("the ".to_owned(), "EN".to_owned(), false));
    }
}
