//! API keys.

use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::path::Path;
use subtle::{Choice, ConstantTimeEq};

/// Keys of which a request must have one. Only their hashes are kept.
#[derive(Clone)]
pub struct ApiKeys(Vec<[u8; 32]>);

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

impl ApiKeys {
    /// Reads a file with a key a line. Empty lines and those that begin with `#` say nothing.
    ///
    /// # Errors
    /// [`Error::Keys`] where it cannot be read, has no key, or one with blanks or other characters that no header can have.
    pub fn from_file(path: &Path) -> Result<ApiKeys> {
        let bad = |problem: String| Error::Keys { path: path.to_owned(), problem };
        let text = std::fs::read_to_string(path).map_err(|e| bad(format!("cannot be read: {e}")))?;
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let key = line.trim();
            if key.is_empty() || key.starts_with('#') {
                continue;
            }
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(bad(format!("line {number}: expected a key of visible ASCII characters without blanks")));
            }
            keys.push(Sha256::digest(key.as_bytes()).into());
        }
        if keys.is_empty() {
            return Err(bad("expected a key a line, found none: nobody could use the server".to_owned()));
        }
        Ok(ApiKeys(keys))
    }

    /// Whether `key` is one of them. All are compared, so that the time tells nothing.
    pub(crate) fn contain(&self, key: &str) -> bool {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        self.0.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&given)).into()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn keys(text: &str) -> Result<ApiKeys> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        ApiKeys::from_file(file.path())
    }

    #[test]
    fn every_key_of_the_file_opens() {
        let keys = keys("# ours\nsk-one\n\n  sk-two \n").unwrap();
        assert!(keys.contain("sk-one") && keys.contain("sk-two"));
        for other in ["", "sk-", "sk-on", "sk-one ", "sk-three", "# ours"] {
            assert!(!keys.contain(other), "{other}");
        }
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn a_file_without_keys_is_refused() {
        for text in ["", "\n# none\n", "two words\n", "schlüssel\n"] {
            assert!(matches!(keys(text), Err(Error::Keys { .. })), "{text}");
        }
        assert!(matches!(ApiKeys::from_file(Path::new("nowhere/keys")), Err(Error::Keys { .. })));
    }
}
