//! `cogni-gateway token`: makes run tokens and shows their contents.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

use crate::base::timestamp;
use crate::gateway::run::token::{
    MAX_AUDIENCE_BYTES, MAX_TOKEN_BYTES, RunTokenClaims, RunTokenKeys, is_audience,
};

/// The subcommands of `token`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum TokenCommand {
    /// Print a token that a run's client uses as its API key.
    Mint {
        /// The run that the token stands for.
        #[arg(long, value_name = "ID")]
        run_id: String,
        /// Time that the token is valid, such as `1h` or `30m`
        #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
        ttl: Duration,
        /// The key that signs the token [default: the first key of the file]
        #[arg(long, value_name = "ID")]
        key_id: Option<String>,
        /// The installation that serves the run, as its `shared.token_audience` [default: none].
        #[arg(long, env = "RUN_TOKEN_AUDIENCE", value_name = "NAME", value_parser = audience)]
        audience: Option<String>,
        /// File with lines of `id = key`.
        #[arg(long, env = "RUN_TOKEN_KEYS_FILE", value_name = "PATH")]
        keys_file: PathBuf,
    },
    /// Read a token from standard input, and print its contents and validity
    Inspect {
        /// The installation that the token must be for [default: none].
        #[arg(long, env = "RUN_TOKEN_AUDIENCE", value_name = "NAME", value_parser = audience)]
        audience: Option<String>,
        /// File with lines of `id = key`; without it the token is not verified
        #[arg(long, env = "RUN_TOKEN_KEYS_FILE", value_name = "PATH")]
        keys_file: Option<PathBuf>,
    },
}

/// Runs the command. The exit status is 1 if a token can be read but is not valid.
pub fn run(
    command: &TokenCommand,
    input: impl Read,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    match command {
        TokenCommand::Mint { run_id, ttl, key_id, audience, keys_file } => {
            let keys = RunTokenKeys::read_file(keys_file)?.for_audience(audience.as_deref());
            let token = keys.mint_token(run_id, *ttl, key_id.as_deref(), SystemTime::now())?;
            writeln!(out, "{token}")?;
            Ok(ExitCode::SUCCESS)
        }
        TokenCommand::Inspect { audience, keys_file } => {
            let token = read_token(input)?;
            let keys = keys_file.as_deref().map(RunTokenKeys::read_file).transpose()?;
            // A token for another installation is not valid here.
            let keys = keys.map(|keys| keys.for_audience(audience.as_deref()));
            inspect_token(token.trim(), keys.as_ref(), SystemTime::now(), out)
        }
    }
}

/// Prints the contents of a token, and whether it is valid at `now`.
pub fn inspect_token(
    token: &str,
    keys: Option<&RunTokenKeys>,
    now: SystemTime,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let Some((key_id, claims)) = RunTokenClaims::decode_unverified(token) else {
        bail!(NOT_A_TOKEN_MESSAGE)
    };
    // These lines are claims of the token; only the last line states whether they are proved.
    writeln!(out, "run      {}", claims.run)?;
    if let Some(audience) = &claims.audience {
        writeln!(out, "audience {audience}")?;
    }
    writeln!(out, "key      {key_id}")?;
    writeln!(out, "issued   {}", format_date(claims.issued))?;
    writeln!(out, "expires  {}", format_date(claims.expires))?;
    let Some(keys) = keys else {
        writeln!(out, "valid    not known; name the keys with --keys-file")?;
        return Ok(ExitCode::FAILURE);
    };
    match keys.verify_token(token, now) {
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

/// Reads at most a token and a line end, so that input that is not a token is not read to its end.
fn read_token(input: impl Read) -> anyhow::Result<String> {
    let mut token = String::new();
    // Two bytes more than the longest token: a line end, possibly of two characters.
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

fn format_date(seconds: u64) -> String {
    // A token may claim any number, and a later time cannot be formatted as a date.
    if seconds > MAX_RFC3339_SECONDS {
        return format!("{seconds} seconds after 1970");
    }
    timestamp::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string()
}

const NOT_A_TOKEN_MESSAGE: &str =
    "this is not a run token; one begins with `cgr1.` (`cogni-gateway token mint` makes them)";

/// The last second that RFC 3339 can express.
const MAX_RFC3339_SECONDS: u64 = 253_402_300_799;
