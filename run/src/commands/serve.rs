//! `moh-run serve`: models over HTTP.

use crate::args::ServeArgs;
use anyhow::Result;
use moh_serve::{ApiKeys, Config, Server};

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    moh_serve::init_log(args.json, args.runtime.quiet());
    let config = Config {
        models: args.models.clone(),
        listen: args.listen,
        runtime: args.runtime.options()?,
        instances: args.instances,
        keys: args.api_key_file.as_deref().map(ApiKeys::from_file).transpose()?,
        limits: args.limits(),
    };
    Ok(Server::start(&config)?.run()?)
}
