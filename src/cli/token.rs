//! `cogni-gateway token`: make run tokens, and look into them.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

use crate::run::token::{Claims, Keys, MAX_AUDIENCE_BYTES, MAX_TOKEN_BYTES, is_audience};

/// Make run tokens, or look into them.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Print a token that a run's client uses as its API key.
    Mint {
        /// The run that the token stands for.
        #[arg(long, value_name = "ID")]
        run_id: String,
        /// How long it is valid, such as `1h` or `30m`.
        #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::time)]
        ttl: Duration,
        /// The key that signs it [default: the first of the file].
        #[arg(long, value_name = "ID")]
        key_id: Option<String>,
        /// The installation that serves the run, as its `shared.token_audience` [default: none].
        #[arg(long, env = "RUN_TOKEN_AUDIENCE", value_name = "NAME", value_parser = audience)]
        audience: Option<String>,
        /// File with lines of `id = key`.
        #[arg(long, env = "RUN_TOKEN_KEYS_FILE", value_name = "PATH")]
        keys_file: PathBuf,
    },
    /// Read a token from standard input; print what it says, and whether it is valid now.
    Inspect {
        /// The installation that the token must be for [default: none].
        #[arg(long, env = "RUN_TOKEN_AUDIENCE", value_name = "NAME", value_parser = audience)]
        audience: Option<String>,
        /// File with lines of `id = key`; without it nothing is proved.
        #[arg(long, env = "RUN_TOKEN_KEYS_FILE", value_name = "PATH")]
        keys_file: Option<PathBuf>,
    },
}

/// Runs the command. The exit code is 1 where a token can be read and is not valid.
pub fn run(command: &Command, input: impl Read, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    match command {
        Command::Mint { run_id, ttl, key_id, audience, keys_file } => {
            let keys = Keys::read(keys_file)?.for_audience(audience.as_deref());
            let token = keys.mint(run_id, *ttl, key_id.as_deref(), SystemTime::now())?;
            writeln!(out, "{token}")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Inspect { audience, keys_file } => {
            let token = read(input)?;
            let keys = keys_file.as_deref().map(Keys::read).transpose()?;
            let keys = keys.map(|keys| keys.for_audience(audience.as_deref()));
            inspect(token.trim(), keys.as_ref(), SystemTime::now(), out)
        }
    }
}

/// Says what a token says, and whether it may be believed at `now`.
pub fn inspect(
    token: &str,
    keys: Option<&Keys>,
    now: SystemTime,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let Some((key_id, claims)) = Claims::peek(token) else { bail!(NOT_A_TOKEN) };
    writeln!(out, "run      {}", claims.run)?;
    if let Some(audience) = &claims.audience {
        writeln!(out, "audience {audience}")?;
    }
    writeln!(out, "key      {key_id}")?;
    writeln!(out, "issued   {}", date(claims.issued))?;
    writeln!(out, "expires  {}", date(claims.expires))?;
    let Some(keys) = keys else {
        writeln!(out, "valid    not known; name the keys with --keys-file")?;
        return Ok(ExitCode::FAILURE);
    };
    match keys.verify(token, now) {
        Ok(_) => {
            writeln!(out, "valid    yes")?;
            Ok(ExitCode::SUCCESS)
        }
        Err(invalid) => {
            writeln!(out, "valid    no: {invalid}")?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// A token and a line end, but not more than that: what is no token is not read to its end.
fn read(input: impl Read) -> anyhow::Result<String> {
    let mut token = String::new();
    let limit = MAX_TOKEN_BYTES as u64 + 2;
    input.take(limit).read_to_string(&mut token).context("cannot read a token from stdin")?;
    Ok(token)
}

fn audience(given: &str) -> Result<String, String> {
    let name = is_audience(given).then(|| given.to_owned());
    name.ok_or_else(|| {
        format!("use 1 to {MAX_AUDIENCE_BYTES} letters, digits, `.`, `_`, `:`, `@`, `/` or `-`")
    })
}

fn date(seconds: u64) -> String {
    if seconds > END_OF_9999 {
        return format!("{seconds} seconds after 1970");
    }
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

const NOT_A_TOKEN: &str =
    "this is not a run token; one begins with `cgr1.` (`cogni-gateway token mint` makes them)";

/// The last second that RFC 3339 can write.
const END_OF_9999: u64 = 253_402_300_799;
