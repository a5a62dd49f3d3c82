-- job_submit.lua: sizes a job from what is to be trained, by asking the planner's service when the job is submitted.
--
--   sbatch --comment="planner model=70b gpu=h100 gpus=128" train.sbatch
--
-- The job gets the nodes, tasks and GPUs of the plan, and PLANNER_PLAN_ID in its environment; a job that no plan fits is
-- refused with the reason.  Comments that do not begin with the word "planner" are none of its business.
-- README.md beside this file says how to install it.  Written for Lua 5.1 (Debian's Slurm) and later.

local function env(name, default)
  local value = os.getenv(name)
  if value == nil or value == "" then return default end
  return value
end

-- Of the environment of slurmctld (systemctl edit slurmctld), or edit them here.
local SETTINGS = {
  url = env("PLANNER_URL", "http://127.0.0.1:8000"),
  -- File with the line "Authorization: Bearer plnr_...", readable by the user of slurmctld only; empty: no token.
  header_file = env("PLANNER_HEADER_FILE", ""),
  -- slurmctld answers nobody while this script runs, so it waits for seconds, never for minutes.
  wait_s = tonumber(env("PLANNER_WAIT_S", "3")) or 3,
  -- When the service cannot answer: "yes" accepts the job as it was submitted, "no" refuses it.
  fail_open = env("PLANNER_FAIL_OPEN", "yes") ~= "no",
  -- How this Slurm writes the GPUs of a node: gres:gpu up to 23.02, gres/gpu later.
  gres = env("PLANNER_GRES", "gres:gpu"),
}

local NO_VAL, NO_VAL16 = 4294967294, 65534

-- What a comment may hold: words of letters, digits, dot, underscore and hyphen; nothing else reaches a shell.
local WORDS = { model = true, gpu = true, system = true, backend = true, precision = true, global_batch = true,
                objective = true }
local NUMBERS = { gpus = true, nodes = true, gpus_per_node = true, seq_len = true }
local PINS = { tp = true, pp = true, vpp = true, cp = true, ep = true, etp = true, dp = true, zero_stage = true,
               micro_batch = true }
local OF_CLUSTER = { gpu = true, system = true, gpus = true, nodes = true, gpus_per_node = true }
local OF_JOB = { seq_len = true, global_batch = true, precision = true, objective = true }

-- Text for users and logs, in one line and without control characters.
local function printable(text, most)
  text = tostring(text):gsub("%c", " ")
  return text:sub(1, most or 400)
end

-- {model = "70b", gpus = "128", ...} of a comment; nil where it is not ours; nil and the complaint where it is wrong.
local function asked(comment)
  if type(comment) ~= "string" or not (comment .. " "):match("^planner%s") then return nil end
  if #comment > 512 then return nil, "the comment is too long" end
  local found = {}
  for word in comment:gsub("^planner%s*", ""):gmatch("%S+") do
    local name, value = word:match("^([a-z_]+)=([A-Za-z0-9][A-Za-z0-9._-]*)$")
    if name == nil or #value > 80 then
      return nil, "'" .. printable(word, 60) .. "' is not name=value (letters, digits, dots, hyphens)"
    end
    if found[name] then return nil, name .. " is given twice" end
    if NUMBERS[name] or PINS[name] then
      if not value:match("^[1-9]%d?%d?%d?%d?%d?%d?$") and not (name == "zero_stage" and value == "0") then
        return nil, name .. " is a whole number from 1 to 9999999"
      end
    elseif not WORDS[name] then
      return nil, "there is no field '" .. name .. "': model, gpu, gpus or nodes, seq_len, global_batch, ..."
    end
    found[name] = value
  end
  for _, name in ipairs({ "model", "gpu" }) do
    if not found[name] and not (name == "gpu" and found.system) then return nil, name .. "=... is missing" end
  end
  if not found.gpus and not found.nodes then return nil, "gpus=... or nodes=... is missing" end
  return found
end

-- One JSON object of the fields in a set; words are of a harmless alphabet by now, numbers are digits.
local function object(found, names)
  local parts = {}
  for name in pairs(names) do
    local value = found[name]
    if value and (NUMBERS[name] or PINS[name]) then
      parts[#parts + 1] = string.format('"%s":%s', name, value)
    elseif value then
      parts[#parts + 1] = string.format('"%s":"%s"', name, value)
    end
  end
  table.sort(parts)
  return "{" .. table.concat(parts, ",") .. "}"
end

local function question(found)
  return string.format('{"model":"%s","cluster":%s,"job":%s,"pins":%s,"backend":"%s","top":1}', found.model,
    object(found, OF_CLUSTER), object(found, OF_JOB), object(found, PINS), found.backend or "auto")
end

-- A word of a shell command, whatever it holds.
local function quoted(text)
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

-- (HTTP status, body) of a POST; status 0 where nobody answered.
local function post(body)
  local words = {
    "exec curl --silent --max-time " .. SETTINGS.wait_s + 2, "--max-filesize 8000000 --proto =http,https --noproxy localhost,127.0.0.1",
    "--header 'Content-Type: application/json'", "--header 'Prefer: wait=" .. SETTINGS.wait_s .. "'",
  }
  if SETTINGS.header_file ~= "" then
    -- From the file, because every user sees the command lines of processes.
    words[#words + 1] = "--header " .. quoted("@" .. SETTINGS.header_file)
  end
  words[#words + 1] = "--data-binary " .. quoted(body) .. " --write-out '\\n%{http_code}'"
  words[#words + 1] = "--url " .. quoted(SETTINGS.url:gsub("/+$", "") .. "/v1/plans") .. " 2>/dev/null"
  local pipe = io.popen(table.concat(words, " "), "r")
  if pipe == nil then return 0, "" end
  local said = pipe:read("*a") or ""
  pipe:close()
  local text, status = said:match("^(.*)\n(%d%d%d)$")
  return tonumber(status) or 0, text or ""
end

-- A value of a JSON text, and where it ends; raises an error where the text is none.
local value_at
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }

local function string_at(text, start)
  local parts, position = {}, start + 1
  while true do
    local stop = text:find('["\\]', position)
    if stop == nil then error("a string without end") end
    parts[#parts + 1] = text:sub(position, stop - 1)
    if text:sub(stop, stop) == '"' then return table.concat(parts), stop + 1 end
    local mark = text:sub(stop + 1, stop + 1)
    if mark == "u" then
      local code = tonumber(text:match("^%x%x%x%x", stop + 2) or error("a wrong escape"), 16)
      parts[#parts + 1] = code < 128 and string.char(code) or "?"
      position = stop + 6
    else
      parts[#parts + 1] = ESCAPES[mark] or error("a wrong escape")
      position = stop + 2
    end
  end
end

local function members_at(text, start, depth, close, keyed)
  local found, position = {}, text:match("^%s*()", start + 1)
  if text:sub(position, position) == close then return found, position + 1 end
  while true do
    local key = #found + 1
    if keyed then
      if text:sub(position, position) ~= '"' then error("a name is missing") end
      key, position = string_at(text, position)
      position = text:match("^%s*:()", position) or error("a colon is missing")
    end
    found[key], position = value_at(text, position, depth + 1)
    local mark
    mark, position = text:match("^%s*([,%]}])%s*()", position)
    if mark == close then return found, position end
    if mark ~= "," then error("a comma is missing") end
  end
end

value_at = function(text, start, depth)
  if depth > 60 then error("nested too deep") end
  local position = text:match("^%s*()", start)
  local first = text:sub(position, position)
  if first == "{" then return members_at(text, position, depth, "}", true) end
  if first == "[" then return members_at(text, position, depth, "]", false) end
  if first == '"' then return string_at(text, position) end
  -- false stands for null: an absent value and a false one are the same here.
  for word, value in pairs({ ["true"] = true, ["false"] = false, ["null"] = false }) do
    if text:sub(position, position + #word - 1) == word then return value, position + #word end
  end
  local number, stop = text:match("^(%-?%d+%.?%d*[eE]?[+-]?%d*)()", position)
  return tonumber(number) or error("no JSON"), stop
end

local function decoded(text)
  local fine, value = pcall(value_at, text, 1, 0)
  return fine and type(value) == "table" and value or nil
end

-- A value inside tables: at(state, "problem", "detail"); nil where something on the way is missing.
local function at(value, ...)
  for _, name in ipairs({ ... }) do
    if type(value) ~= "table" then return nil end
    value = value[name]
  end
  return value
end

local function refused(reason, hint)
  local text = "planner: " .. printable(reason)
  if type(hint) == "string" and hint ~= "" then text = text .. " (" .. printable(hint) .. ")" end
  slurm.user_msg(text)
  return slurm.ERROR
end

-- The service cannot say: the job goes on as it is, or not, as the site has decided.
local function undecided(reason)
  slurm.log_info("planner: %s", printable(reason))
  if not SETTINGS.fail_open then return refused(reason, "submit again in a minute, or without the comment") end
  slurm.user_msg("planner: " .. printable(reason) .. "; the job is accepted as it was submitted")
  return slurm.SUCCESS
end

local function is_set(value)
  return value ~= nil and value ~= NO_VAL and value ~= NO_VAL16 and value ~= 0
end

-- (GPUs that an option's text asks for, nil for none; the other resources in it), of "gres:gpu:h100:8,gres:nvme:1".
local function gpus_of(text)
  local number, others = nil, {}
  for part in (text or ""):gmatch("[^,]+") do
    local name = part:gsub("^gres[:/]", "")
    if name == "gpu" or name:match("^gpu[:=]") then
      number = (number or 0) + tonumber(name:match("[:=](%d+)$") or 1)
    else
      others[#others + 1] = part
    end
  end
  return number, others
end

-- Where the job asks for other GPUs than the plan: "--gpus", say; nil where it asks for none or the same.
local function other_gpus(job, nodes, on_node)
  local options = {
    { "--gres or --gpus-per-node", job.tres_per_node, on_node }, { "--gpus", job.tres_per_job, nodes * on_node },
    { "--gpus-per-task", job.tres_per_task, on_node }, { "--gpus-per-socket", job.tres_per_socket, nil },
  }
  for position = 1, #options do
    local name, text, planned = options[position][1], options[position][2], options[position][3]
    local stated = gpus_of(text)
    if stated ~= nil and stated ~= planned then return name end
  end
  return nil
end

-- Puts the size of the plan into the job; refuses a job that states another.
local function sized(job, state)
  local cluster, strategy = at(state, "result", "request", "cluster"), at(state, "result", "best", "strategy")
  local gpus, per_node = at(cluster, "gpus"), at(cluster, "gpus_per_node")
  local id = at(state, "id")
  if type(gpus) ~= "number" or type(per_node) ~= "number" or per_node < 1 or type(strategy) ~= "table"
    or type(id) ~= "string" or not id:match("^[%w_-]+$") then
    return undecided("the service's answer was not understood")
  end
  local nodes = math.ceil(gpus / per_node)
  local on_node = math.min(gpus, per_node)
  local least, most = job.min_nodes, job.max_nodes
  if (is_set(most) and most < nodes) or (is_set(least) and least > nodes) then
    return refused(string.format("the plan needs %d nodes, the job asks for others", nodes), "leave out --nodes")
  end
  job.min_nodes, job.max_nodes = nodes, nodes
  local stated = other_gpus(job, nodes, on_node)
  if stated ~= nil then
    return refused(string.format("the plan needs %d GPUs a node, the job asks for others", on_node), "leave out " .. stated)
  end
  job.num_tasks, job.ntasks_per_node = nodes, 1
  if job.ntasks_per_socket ~= nil then job.ntasks_per_socket = NO_VAL16 end
  -- Slurm has counted the cores by the tasks that the job had until now.
  job.min_cpus = nodes * (is_set(job.cpus_per_task) and job.cpus_per_task or 1)
  local asked_for, others = gpus_of(job.tres_per_node)
  if asked_for == nil then
    others[#others + 1] = string.format("%s:%d", SETTINGS.gres, on_node)
    job.tres_per_node = table.concat(others, ",")
  end
  local degrees = {}
  for _, name in ipairs({ "tp", "cp", "pp", "ep", "dp", "zero_stage", "micro_batch" }) do
    local degree = strategy[name]
    if type(degree) == "number" then
      degrees[#degrees + 1] = string.format("%s=%d", name, degree)
      if job.environment ~= nil then job.environment["PLANNER_" .. name:upper()] = string.format("%d", degree) end
    end
  end
  if job.environment ~= nil then
    job.environment["PLANNER_PLAN_ID"] = id
    job.environment["PLANNER_URL"] = SETTINGS.url
  end
  local verdict = string.format("plan %s: %d nodes x %d GPUs, %s, est. %.3g s a step", id:sub(1, 12), nodes, on_node,
    table.concat(degrees, " "), at(state, "result", "best", "estimate", "step_time_s") or 0)
  job.admin_comment = "planner " .. verdict
  slurm.user_msg("planner: " .. verdict)
  slurm.log_info("planner: %s", verdict)
  return slurm.SUCCESS
end

local function decided(job)
  local found, complaint = asked(job.comment)
  if complaint then return refused(complaint, 'for example --comment="planner model=70b gpu=h100 gpus=128"') end
  if found == nil then return slurm.SUCCESS end
  local status, text = post(question(found))
  local answer = decoded(text)
  if status == 0 then return undecided("the service did not answer") end
  if answer == nil then return undecided("the service's answer was not understood (" .. status .. ")") end
  if status == 202 then return undecided("the plan is not ready yet, the service works on it") end
  if status == 200 and not answer.outcome then return undecided("the service could not finish the plan") end
  if status == 200 and answer.outcome == "plan" then return sized(job, answer) end
  if status == 200 then
    return refused(at(answer, "problem", "detail") or "there is no plan", at(answer, "problem", "hint"))
  end
  -- What the user wrote is wrong; anything else (no token, too busy, broken) is not the user's doing.
  if status == 400 or status == 404 or status == 422 then
    return refused(answer.detail or answer.title or "the question was refused", answer.hint)
  end
  return undecided("the service refused to answer (" .. status .. ")")
end

function slurm_job_submit(job, partitions, user)
  -- An error here must not stop every submission of the cluster.
  local fine, result = pcall(decided, job)
  if fine then return result end
  return undecided("job_submit.lua: " .. tostring(result))
end

function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end

return slurm.SUCCESS
