//! Why a server does not start.

use std::net::SocketAddr;
use std::path::PathBuf;

/// What keeps the server from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model without a usable name.
    #[error(
        "{model}: expected a model's path, or NAME=PATH with a name of letters, digits, `.`, `_` and `-`, found the name {name:?}"
    )]
    Name {
        /// What was given.
        model: String,
        /// The name in it.
        name: String,
    },
    /// Two models of one name.
    #[error("{} and {}: both are called {name}: give one another name, as NAME=PATH", first.display(), second.display())]
    Twice {
        /// The name.
        name: String,
        /// A model.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
    },
    /// A model that cannot be served.
    #[error("cannot serve {name}")]
    Model {
        /// Its name.
        name: String,
        /// Why not.
        source: moh_tasks::Error,
    },
    /// A chat template that cannot be used.
    #[error("{}: {problem}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A file of keys that cannot be used.
    #[error("{}: {problem}", path.display())]
    Keys {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system gave no threads or signals.
    #[error("cannot start the server's threads")]
    Start(#[source] std::io::Error),
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
